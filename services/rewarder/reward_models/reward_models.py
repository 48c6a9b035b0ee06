"""Keeps reward models by name, loads them, and unloads one when another needs its place.

There are HEADRACE_REWARD_MODEL_MAX_LOADED places. A model takes one at a check or at its first call, and keeps it until
another model needs it. Then the least recently used model is unloaded, but never a model that a call waits for, that is
being checked, or that a run uses. If no model can be unloaded, the call is an overload, and a check is refused.
"""

import asyncio
import importlib.util
from collections.abc import Callable, Collection
from pathlib import Path

from services.rewarder.reward_answer import Answer, Inspected
from services.rewarder.reward_call import RewardCall
from services.rewarder.reward_failure import RewardFailure
from services.rewarder.reward_models.model_files import Fingerprint, fingerprint
from services.rewarder.reward_models.model_name import ModelPlace, is_reward_model, model_place
from services.rewarder.reward_models.model_settings import ModelSettings
from services.rewarder.reward_models.reward_model_metrics import RewardModelMetrics
from services.rewarder.reward_models.served_model import ServedModel
from shared.errors import UserError
from shared.files.file_roots import FileRoots
from shared.install_commands import install_extras
from shared.service.daemon_thread import in_thread
from shared.user_code.worker_frames import Refused

_NEEDED = ("torch", "transformers", "safetensors")
_MAX_REMEMBERED = 64
"""Most models without a process to remember, such as models that could not be loaded."""


class RewardModels:
    """Loads Hugging Face sequence classifiers, and calls them as reward functions.

    Args:
        settings: Device, limits and deadlines of loading and calling models.
        metrics: Receives the counts.
        in_use: Returns the reward names of the runs that are served now.
    """

    def __init__(
        self, settings: ModelSettings, *, metrics: RewardModelMetrics, in_use: Callable[[], Collection[str]]
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._in_use = in_use
        self._models: dict[str, ServedModel] = {}  # least recently used first
        self._seen: dict[str, Fingerprint | None] = {}
        self._checking: set[str] = set()
        self._num_checks = 0
        self._making_room = asyncio.Lock()
        self._is_closed = False

    async def knows(self, name: str) -> bool:
        """Return whether ``name`` means a reward model: it has a slash, as directories and Hugging Face ids do."""
        return is_reward_model(name)

    def exists(self, name: str) -> bool:
        """Return whether this rewarder knows the model, and the model's config was accepted."""
        return name in self._models and self._models[name].described is not None

    async def inspect(self, name: str) -> Inspected | Refused:
        """Load the model and describe it, or return the reason why it cannot be used.

        A model whose config was accepted may still be loading. A directory that has changed is loaded again.
        """
        self._num_checks += 1
        try:
            self._checking.add(name)
            model = await self._model(name, anew_if_changed=True)
            refusal = await model.check(timeout_s=self._settings.check_timeout_s)
        except UserError as error:
            return Refused(str(error))
        except RewardFailure as failure:
            return Refused(failure.detail)
        finally:
            # Models that are checked together will be used together, so none of them is unloaded for another.
            self._num_checks -= 1
            if not self._num_checks:
                self._checking.clear()
        if refusal is not None:
            return Refused(refusal)
        version = "" if model.loaded is None else model.loaded.version
        return Inspected("reward-model", _summary(model), version=version)

    async def call(self, name: str, call: RewardCall, *, timeout_s: float, lane: str) -> tuple[Answer, float]:
        """Score the call's completions with the model, after loading it if needed.

        The deadline starts when the model begins to score the call.

        Raises:
            RewardFailure: The call failed. Its outcome says why.
        """
        try:
            model = await self._model(name)
        except UserError as error:
            raise RewardFailure("error", str(error)) from error
        return await model.call(call, timeout_s=timeout_s, lane=lane)

    async def close(self) -> None:
        """End the processes of all models, and refuse to start new ones."""
        self._is_closed = True
        models, self._models = list(self._models.values()), {}
        await asyncio.gather(*(model.close() for model in models))

    def listed(self) -> dict[str, tuple[str, str]]:
        """Return the summary and version of each loaded model, by name."""
        return {
            name: (_summary(model), model.loaded.version)
            for name, model in self._models.items()
            if model.loaded is not None
        }

    async def _model(self, name: str, *, anew_if_changed: bool = False) -> ServedModel:
        """Return the model, and first make room for it by unloading another one if needed.

        Raises:
            UserError: The name is not valid, or torch, transformers or safetensors is not installed.
            RewardFailure: No place is free, the model's files have changed during calls, or the rewarder is stopping.
        """
        known = self._models.get(name)
        if known is None or anew_if_changed or (not known.is_up and known.recent_failure() is None):
            await self._make(name, anew_if_changed=anew_if_changed)
        if self._is_closed:
            raise RewardFailure("error", "the rewarder is stopping")
        model = self._models.pop(name)
        self._models[name] = model  # the end of the dict is the most recently used
        return model

    async def _make(self, name: str, *, anew_if_changed: bool) -> None:
        async with self._making_room:
            place, seen = await in_thread(lambda: _look_at(name, self._settings.roots), name="look at a reward model")
            known = self._models.get(name)
            is_changed = known is not None and seen != self._seen[name]
            if known is not None and is_changed and known.is_busy and anew_if_changed:
                raise RewardFailure(
                    "overload",
                    f"the files of {name} were changed while calls of it are under way; try again when there are none, "
                    "or give the changed model a directory of its own",
                )
            if known is not None and is_changed and not known.is_busy:
                await self._forget(name).close()
                known = None
            if known is not None and known.is_up:
                return
            missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
            if missing:
                raise UserError(
                    f"'{name}' is a reward model, and this rewarder does not have {', '.join(missing)}; where it runs, "
                    f"install with {install_extras('rewarder-models')}"
                )
            await self._make_room(name)
            if known is None:
                self._models[name] = ServedModel(name, place, self._settings, self._metrics)
                self._seen[name] = seen

    async def _make_room(self, name: str) -> None:
        down = [other for other, model in self._models.items() if not model.is_up and other != name]
        for other in down[:-_MAX_REMEMBERED]:
            self._forget(other)
        while len(up := [other for other, model in self._models.items() if model.is_up]) >= self._settings.max_loaded:
            used = {*self._in_use(), *self._checking}
            idle = [other for other in up if not self._models[other].is_busy and other not in used]
            if not idle:
                raise RewardFailure(
                    "overload",
                    f"{name} cannot be loaded beside {', '.join(up)}: they are in use, and this rewarder has "
                    f"{self._settings.max_loaded} at a time; set HEADRACE_REWARD_MODEL_MAX_LOADED",
                )
            await self._forget(idle[0]).close()

    def _forget(self, name: str) -> ServedModel:
        del self._seen[name]
        return self._models.pop(name)


def _look_at(name: str, roots: FileRoots) -> tuple[ModelPlace, Fingerprint | None]:
    """Return the model's place, and the fingerprint of its directory, or None without one. Slow: looks at every file.

    Raises:
        UserError: The name is not valid, or the directory does not exist or is not allowed.
    """
    place = model_place(name, roots)
    try:
        return place, fingerprint(Path(place.source)) if place.is_directory else None
    except OSError:
        return place, None


def _summary(model: ServedModel) -> str:
    if model.loaded is not None:
        loaded = model.loaded
        return f"{loaded.architecture} on {loaded.device} in {loaded.dtype}"
    architecture = "" if model.described is None else f"{model.described.architecture}, "
    return f"{architecture}still being loaded: its config was checked, its weights were not"
