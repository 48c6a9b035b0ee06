"""Writes deploy/helm/headrace/README.md: a short introduction, and every value with its default and its comment.

values.yaml --keys, defaults, comments--> README.md        tests/helm compares the two
"""

import re
from pathlib import Path

CHART = Path(__file__).resolve().parent / "headrace"
README = CHART / "README.md"

HEAD = """\
# headrace

GRPO post-training of language models as services: trainer, generators (vLLM), rewarders and Redis.

```bash
helm install headrace oci://registry.example.com/team/charts/headrace --version 0.1.0 -n rl --create-namespace \\
    -f values-images-gpu.yaml -f values-8-gpu-node.yaml
helm test headrace -n rl --logs
```

`deploy/release.py` builds and pushes the images and this chart, and writes `values-images-gpu.yaml` and
`values-images-cpu.yaml`, which name the images by digest.
docs/kubernetes.md in the repository explains what the chart makes, and which values go together.

## Values

Written by `deploy/helm/make_readme.py` from `values.yaml`. `values.schema.json` refuses any other key.

| key | default | meaning |
|---|---|---|
"""

LINE = re.compile(r"^(?P<indent> *)(?P<key>[\w.-]+):(?P<rest>.*)$")


def main() -> None:
    """Write the file."""
    README.write_text(readme((CHART / "values.yaml").read_text(encoding="utf-8")), encoding="utf-8")


def readme(values: str) -> str:
    """Return the page's text, made from the text of values.yaml."""
    return HEAD + "".join(f"| `{key}` | {default} | {meaning} |\n" for key, default, meaning in rows(values))


def rows(values: str) -> list[tuple[str, str, str]]:
    """Return key, default and meaning of every line of values.yaml that has a default or a comment.

    A comment is on the line of its key or on the lines before it. One before a group of keys belongs to the group.
    """
    found: list[tuple[str, str, str]] = []
    path: list[str] = []
    before: list[str] = []
    for line in values.splitlines():
        stripped = line.strip()
        if stripped.startswith("# --") or not stripped:
            before = []
        elif stripped.startswith("#"):
            before.append(stripped.removeprefix("#").strip())
        elif match := LINE.match(line):
            path[len(match["indent"]) // 2 :] = [match["key"]]
            value, *comment = re.split(r"\s# ", match["rest"], maxsplit=1)
            meaning = " ".join([*before, *comment]).strip()
            default = f"`{value.strip()}`" if value.strip() else ""
            if default or meaning:
                found.append((".".join(path), default, meaning.replace("|", "\\|")))
            before = []
        else:
            raise ValueError(f"values.yaml has a line that is neither a key nor a comment: {line!r}")
    return found


if __name__ == "__main__":
    main()
