"""Write values into the template of a first spec, whose comments stay."""

from __future__ import annotations

import re
from collections.abc import Mapping

from clusterddp.spec.write import flow_yaml

_COMMENT_COLUMN = 30
_KEY = re.compile(r"(  )?([a-z_]+):(?= |$)")
_TRAIN = re.compile(r"^train:.*\Z", re.MULTILINE | re.DOTALL)
_HOSTS = re.compile(r"^  hosts: .*$", re.MULTILINE)
_TOGETHER = ("resources.procs_per_node", "resources.gpus_per_node")
"""Keys of which one follows the other."""
_ENTRY = """\
entry:
  script: {script}
  # args: [--lr, 0.1, --out, "{{output_dir}}"]   # {{output_dir}}: a directory for the results of this run alone

# The built-in trainer instead of a script:
# train: {{model: resnet18, dataset: cifar10, epochs: 30}}
"""


def with_hosts(text: str, hosts: str) -> str:
    """Write the hosts, which are YAML."""
    return _HOSTS.sub(lambda _: f"  hosts: {hosts}", text, count=1)


def with_script(text: str, script: str) -> str:
    """Write the script in place of the trainer, the last section of each template."""
    return _TRAIN.sub(lambda _: _ENTRY.format(script=flow_yaml(script)), text)


def without_given(text: str, files: Mapping[str, str]) -> str:
    """Turn the lines of keys that a shared file gives into comments with its name; `files`: dotted key -> the name."""
    given = dict(zip(files, files, strict=True))
    for key in _TOGETHER:
        given |= {other: key for other in _TOGETHER if key in files and other not in files}
    lines, section = list[str](), ""
    for line in text.splitlines():
        match = _KEY.match(line)
        if match is None:
            lines.append(line)
            continue
        section = section if match[1] else match[2]
        by = given.get(f"{section}.{match[2]}" if match[1] else section)
        was = f"{match[1] or ''}# {line.strip().partition(' #')[0].strip()}"
        lines.append(line if by is None else f"{was:<{_COMMENT_COLUMN}}# {files[by]} has {by}")
    return "\n".join(lines) + "\n"
