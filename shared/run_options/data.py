"""Run options for data: data sets, the columns of their rows, prompts, and evaluation.

The names come from TRL's ``ScriptArguments``, and in a mixture from its ``DatasetConfig``. docs/datasets.md explains
them with examples.
"""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from shared.run_options.section import Positive, Section, whole_or_share

Name = Annotated[str, Field(min_length=1)]
MAX_COLUMNS = 1000
LOCAL_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
STREAMED_SUFFIXES = (".jsonl", ".parquet")
"""Files that can be read in order, a part at a time."""
_WHERE = "Path of a .jsonl, .json, .csv or .parquet file, or of a directory; or a Hugging Face dataset id"
_SET_BY_US = {
    *("conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("tokenizer_kwargs", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    "return_assistant_tokens_mask",
}


class DatasetSource(Section):
    """One data set of a mixture, under the names of TRL's ``DatasetConfig``."""

    path: Name = Field(description=_WHERE)
    name: str | None = Field(default=None, description="Configuration of a hub data set")
    split: Name = Field(default="train", description="Split of a hub data set")
    fraction: Positive | None = Field(
        default=None,
        description="Share of the prompts, relative to the sum of all fractions; in proportion to the rows if left out",
    )
    rename_columns: dict[Name, Name] | None = Field(
        default=None, max_length=MAX_COLUMNS, description="Replaces the run's rename_columns for this data set"
    )
    columns: list[Name] | None = Field(
        default=None, max_length=MAX_COLUMNS, description="Replaces the run's columns for this data set"
    )

    @property
    def is_file(self) -> bool:
        """Whether ``path`` ends like a data file, such as in ``.jsonl``; else it is a directory or a hub data set."""
        return self.path.endswith(LOCAL_SUFFIXES)

    def same_rows_as(self, other: "DatasetSource") -> bool:
        """Return whether both have the same rows, even if they rename columns differently."""
        if PurePath(self.path) != PurePath(other.path):
            return False
        return self.is_file or (self.name, self.split) == (other.name, other.split)


class DataOptions(Section):
    """Options of data sets, prompts and evaluation."""

    datasets: list[DatasetSource] | None = Field(
        default=None, min_length=1, max_length=64, description="Several data sets, mixed; instead of dataset_name"
    )
    dataset_name: str | None = Field(
        default=None,
        validate_default=True,
        description=_WHERE,
    )
    dataset_config: str | None = Field(default=None, description="Configuration of a hub data set")
    dataset_train_split: Name = Field(default="train", description="Split of a hub data set")
    shuffle_dataset: bool = Field(default=True, description="Shuffle the rows anew in each epoch")
    dataset_streaming: bool = Field(
        default=False, description="Read the data set in order while training, instead of whole; needs max_steps"
    )
    shuffle_buffer_size: int = Field(
        default=1000, ge=1, le=1_000_000, description="Rows of a streamed data set that are shuffled among themselves"
    )
    seed: int = Field(default=42, ge=0, description="Seed of the shuffling and of the trainer")

    # Rows and prompts
    prompt_column: Name = Field(default="prompt", description="Column with the text or the messages")
    rename_columns: dict[Name, Name] | None = Field(
        default=None,
        max_length=MAX_COLUMNS,
        description="Names in the data to names for the run, such as {question: prompt}",
    )
    columns: list[Name] | None = Field(
        default=None,
        max_length=MAX_COLUMNS,
        description="Columns that go to reward functions and environments, under their new names; all if left out",
    )
    system_prompt: Name | None = Field(
        default=None,
        description="System message put before every prompt without a system message; text becomes a user's message",
    )
    prompt_as_message: bool = Field(
        default=False, description="Text becomes a user's message, so that the chat template applies"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Passed to the chat template, such as {enable_thinking: false}"
    )
    max_prompt_length: int | None = Field(
        default=None, ge=1, description="Tokens; longer prompts are dropped as prompt_too_long, counted"
    )

    # Evaluation
    eval_dataset_name: Name | None = Field(
        default=None, description="Prompts that are never trained on: a file, or a Hugging Face dataset id"
    )
    eval_dataset_config: str | None = Field(default=None, description="Configuration of eval_dataset_name on the hub")
    dataset_test_split: Name | None = Field(
        default=None,
        description="Split to evaluate on: of eval_dataset_name (test if left out), otherwise of dataset_name",
    )
    eval_steps: int | float | None = Field(
        default=None,
        gt=0,
        description="Optimizer steps between evaluations; below 1, a share of the run's steps. The last step is always "
        "evaluated",
    )
    eval_on_start: bool = Field(default=False, description="Evaluate the policy before its first step too")
    num_generations_eval: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Completions per prompt in an evaluation; num_generations if left out",
    )
    max_eval_prompts: int = Field(
        default=256, ge=1, description="Number of prompts to evaluate on: the first of the evaluation set"
    )

    _eval_steps_are_whole = field_validator("eval_steps")(whole_or_share)

    @field_validator("dataset_name")
    @classmethod
    def _one_way_to_name_the_data(cls, name: str | None, info: ValidationInfo) -> str | None:
        if "datasets" not in info.data:  # `datasets` itself was refused
            return name
        if not name and not info.data["datasets"]:
            raise ValueError(f"is required: {_WHERE}; to mix several data sets, list them in `datasets` instead")
        if name and info.data["datasets"]:
            raise ValueError("is set, and `datasets` too; give only one, or move this data set into the list")
        return name

    @field_validator("datasets")
    @classmethod
    def _a_mixture_can_be_mixed(cls, sources: list[DatasetSource] | None) -> list[DatasetSource] | None:
        for number, source in enumerate(sources or ()):
            if any(source.same_rows_as(other) for other in (sources or ())[:number]):
                raise ValueError(f"{source.path} is listed twice; give it one larger fraction instead")
        given = [source.path for source in sources or () if source.fraction is not None]
        if given and len(given) < len(sources or ()):
            missing = ", ".join(source.path for source in sources or () if source.fraction is None)
            raise ValueError(
                f"fraction is set for {', '.join(given)} and not for {missing}; set it for all or for none"
            )
        return sources

    @field_validator("rename_columns")
    @classmethod
    def _a_renamed_column_has_another_name(cls, renamed: dict[str, str] | None) -> dict[str, str] | None:
        for old, new in (renamed or {}).items():
            if old == new:
                raise ValueError(f"{old!r} is renamed to itself; write {{name in the data: name for the run}}")
        return renamed

    @field_validator("chat_template_kwargs")
    @classmethod
    def _what_we_set_ourselves_is_not_for_the_template(cls, given: dict[str, Any] | None) -> dict[str, Any] | None:
        if ours := [name for name in given or {} if name in _SET_BY_US]:
            raise ValueError(
                f"{', '.join(ours)} cannot be set, because it decides how the template is called: prompts are token "
                "lists that end where the answer begins. Give only arguments of the template itself"
            )
        return given

    @model_validator(mode="after")
    def _a_mixture_names_configurations_and_splits_itself(self) -> Self:
        if self.datasets is not None:
            if self.dataset_config is not None:
                raise ValueError("dataset_config belongs to dataset_name; in `datasets` give each entry its `name`")
            if self.dataset_train_split != "train":
                raise ValueError(
                    "dataset_train_split belongs to dataset_name; in `datasets` give each entry its `split`"
                )
            if self.dataset_test_split is not None and self.eval_dataset_name is None:
                raise ValueError(
                    "dataset_test_split is a split of dataset_name, and there are several data sets; name the one to "
                    "evaluate on as eval_dataset_name"
                )
        return self

    @model_validator(mode="after")
    def _one_data_set_is_streamed(self) -> Self:
        name = self.dataset_name or ""
        if not self.dataset_streaming:
            if self.shuffle_buffer_size != type(self).model_fields["shuffle_buffer_size"].default:
                raise ValueError("shuffle_buffer_size has no effect; set dataset_streaming: true, or leave it out")
        elif self.datasets is not None:
            raise ValueError(
                "dataset_streaming reads one data set in order, and `datasets` mixes several by their numbers of rows; "
                "give dataset_name, or leave dataset_streaming out"
            )
        elif name.endswith(LOCAL_SUFFIXES) and not name.endswith(STREAMED_SUFFIXES):
            raise ValueError(
                f"dataset_streaming cannot read {name} in parts; convert it to .jsonl or .parquet, or leave "
                "dataset_streaming out"
            )
        return self

    @model_validator(mode="after")
    def _a_file_has_no_configuration_and_no_splits(self) -> Self:
        for setting, value, path in self._configurations_and_splits():
            if value is not None and path.endswith(LOCAL_SUFFIXES):
                raise ValueError(
                    f"{setting} is for data sets of the hub, but {path} is a file, which has neither configurations "
                    "nor splits: all of its rows are taken. Leave it out"
                )
        return self

    def _configurations_and_splits(self) -> Iterator[tuple[str, str | None, str]]:
        """Yield each setting for a configuration or split, its value (None if not chosen), and the data set's path."""
        train_split = self.dataset_train_split if self.dataset_train_split != "train" else None
        yield "dataset_config", self.dataset_config, self.dataset_name or ""
        yield "dataset_train_split", train_split, self.dataset_name or ""
        yield "eval_dataset_config", self.eval_dataset_config, self.eval_dataset_name or ""
        yield "dataset_test_split", self.dataset_test_split, self.eval_dataset_name or ""
        for number, source in enumerate(self.datasets or ()):
            yield f"datasets.{number}.name", source.name, source.path
            yield f"datasets.{number}.split", source.split if source.split != "train" else None, source.path

    @model_validator(mode="after")
    def _evaluation_has_prompts_and_a_time(self) -> Self:
        found = self.eval_source()
        if found is None:
            names = ("eval_steps", "eval_on_start", "num_generations_eval", "eval_dataset_config", "max_eval_prompts")
            for name in names:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name} is set, but there is nothing to evaluate on; give eval_dataset_name, or a "
                        "dataset_test_split of dataset_name"
                    )
            return self
        where, source = found
        if where == "dataset_test_split" and source.is_file:
            raise ValueError(
                f"dataset_test_split={source.split!r} is a split of dataset_name, but {source.path} is a file, which "
                "has none; write the rows to evaluate on to another file and give it as eval_dataset_name"
            )
        for trained in self.train_sources().values():
            if source.same_rows_as(trained):
                raise ValueError(
                    f"{where} names training data ({source.path}, split {source.split}); an evaluation on it "
                    "would only show what was memorised"
                )
        if self.eval_steps is None and not self.eval_on_start:
            raise ValueError(
                f"{where} is set, but nothing says when to evaluate; set eval_steps, or eval_on_start: true"
            )
        return self

    def train_sources(self) -> dict[str, DatasetSource]:
        """Return the data sets for training, by the name of the setting that names them."""
        if self.datasets is not None:
            return {f"datasets.{number}": source for number, source in enumerate(self.datasets)}
        name = self.dataset_name or ""
        return {"dataset_name": DatasetSource(path=name, name=self.dataset_config, split=self.dataset_train_split)}

    def eval_source(self) -> tuple[str, DatasetSource] | None:
        """Return the setting that names the evaluation set, and the set; None without one."""
        if self.eval_dataset_name is not None:
            split = self.dataset_test_split or "test"
            source = DatasetSource(path=self.eval_dataset_name, name=self.eval_dataset_config, split=split)
            return "eval_dataset_name", source
        if self.dataset_name is not None and self.dataset_test_split is not None:
            config = self.eval_dataset_config or self.dataset_config
            source = DatasetSource(path=self.dataset_name, name=config, split=self.dataset_test_split)
            return "dataset_test_split", source
        return None
