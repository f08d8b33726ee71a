"""The page of the keys of a spec, from the JSON Schema that `clusterddp schema` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from docs_pictures import command_output
from docs_text import filled, head, page

_NO_LIMIT = 2**31 - 1
EXAMPLES: dict[str, str] = {
    "name": "resnet50",
    "python": "/opt/torch/bin/python",
    "venv": "~/torch",
    "conda": "torch",
    "setup": "[module load cuda/12]",
    "env": "{NCCL_DEBUG: WARN}",
    "secrets": "[WANDB_API_KEY]",
    "restarts": "2",
    "hang_after": '"0:05:00"',
    "keep": "30d",
    "after": "[brisk-otter-3]",
    "resources.nodes": "2",
    "resources.procs_per_node": "2",
    "resources.gpus_per_node": "8",
    "resources.cpus_per_task": "4",
    "resources.memory_gb": "64",
    "resources.time": '"8:00:00"',
    "network.interface": "ib0",
    "network.master_port": "29500",
    "network.start_timeout": '"0:10:00"',
    "network.host_silence": '"0:01:00"',
    "network.heartbeat_timeout": '"0:02:00"',
    "stop.lead": '"0:05:00"',
    "stop.grace": '"0:05:00"',
    "notify.on": "[end, hang]",
    "notify.command": "[notify-send, a run has ended]",
    "notify.webhook": "${SLACK_URL}",
    "notify.mail": "ada@example.org",
    "train.image_size": "224",
    "train.data_dir": "/data",
    "train.samples": "1000",
    "train.max_steps": "100",
    "train.ema": "0.99",
    "train.cutout": "8",
    "train.comm": '"local:8"',
    "entry.script": "train.py",
    "entry.module": "pkg.train",
    "entry.function": '"pkg.train:fit"',
    "entry.command": "[torchrun, train.py]",
    "entry.batch_script": "train.slurm",
    "entry.args": '[--lr, 0.1, --out, "{output_dir}"]',
    "entry.kwargs": "{lr: 0.1}",
    "entry.stop_signal": "TERM",
    "entry.data_dir": "/data",
    "entry.output_dir": "/scratch/out",
    "container.image": "/images/torch.sqsh",
    "container.mounts": "[/scratch]",
    "container.workdir": "/workspace",
    "ssh.hosts": '[gpu01, "gpu[02-04]"]',
    "ssh.modules": "[cuda/12]",
    "ssh.send": "{data: ~/data}",
    "sweep.values": "{train.lr: [0.1, 0.2]}",
    "sweep.throttle": "2",
    "ssh.hosts.python": "python3.11",
    "ssh.hosts.venv": "~/torch",
    "ssh.hosts.conda": "torch",
    "ssh.hosts.modules": "[cuda/12]",
    "ssh.hosts.host": "gpu01",
    "ssh.hosts.gpus": "8",
    "ssh.hosts.host_key": '"SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU"',
}
"""Key -> a value of it as YAML, where the default is none, or says little."""
_SPECIMEN = """\
```yaml
name: resnet50
launcher: slurm               # local | ssh | slurm
resources:
  nodes: 2
  gpus_per_node: 8            # one rank per GPU
  cpus_per_task: 8            # cores for each rank
  memory_gb: 256              # on each node
  time: "8:00:00"
slurm: {partition: gpu, account: vision}
conda: torch                  # whose Python runs the ranks
setup: [module load cuda/12]
env: {NCCL_DEBUG: WARN}
secrets: [WANDB_API_KEY]      # by name, from the shell that submits
restarts: 2                   # from the newest checkpoint
notify: {on: [end, hang], webhook: "${SLACK_URL}"}
entry:                        # or train: the built-in trainer
  script: train.py
  data_dir: /data/imagenet
  args: [--data, "{data_dir}", --out, "{output_dir}"]
```
"""


def spec_page() -> str:
    schema = json.loads(command_output("schema"))
    lines = head(
        "Keys of a spec",
        "A spec is one YAML file. `clusterddp schema` prints the same as a JSON Schema, with which an editor completes "
        "and checks. An unknown key is an error. `KEY=VALUE` after the spec on the command line changes a value: "
        "`clusterddp submit job.yaml train.lr=0.2`. Each key has a line of YAML, inside its section.",
    )
    lines += [*_SPECIMEN.splitlines(), ""]
    keys, sections = schema["properties"], schema["$defs"]
    lines += ["## Top level", ""]
    for name, key in keys.items():
        if _section(key, sections) is None and name != "slurm":
            lines += _key(name, key, required=name in schema.get("required", ()))
    for name, key in keys.items():
        section = _section(key, sections)
        if section is not None:
            lines += [f"## {name}", "", *filled(_both(key["description"], section["description"])), ""]
            lines += _keys(name, section)
    lines += ["## Items of ssh.hosts", "", *filled(sections["SshHost"]["description"]), ""]
    lines += _keys("ssh.hosts", sections["SshHost"])
    lines += [
        "## slurm",
        "",
        *filled(
            f"{keys['slurm']['description']} With `-` or `_`: `partition: gpu`, `mail-type: END`, `exclusive: true`. "
            "[Slurm](../slurm.md#options) lists what the other keys of a spec become."
        ),
    ]
    return page(lines)


def _section(key: Mapping[str, Any], sections: Mapping[str, Any]) -> Any:
    """Return the section that a key of the top level holds; None for a plain value."""
    for part in (key, *key.get("anyOf", ())):
        if "$ref" in part:
            return sections[part["$ref"].rpartition("/")[2]]
    return None


def _both(of_key: str, of_section: str) -> str:
    """Join what the key says and what its section says, unless one begins as the other."""
    return of_section if of_section.startswith(of_key.rstrip(".")) else f"{of_key} {of_section}"


def _keys(section: str, schema: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for name, key in schema["properties"].items():
        if not str(key.get("description", "")).startswith("Alias of"):
            lines += _key(f"{section}.{name}", key, required=name in schema.get("required", ()))
    return lines


def _key(name: str, key: Mapping[str, Any], *, required: bool) -> list[str]:
    default = "" if key.get("default") in (None, [], {}) else json.dumps(key["default"])
    plain = default.strip('"')
    example = EXAMPLES.get(name, plain)
    line = f"`{name.rpartition('.')[2]}: {example}`"
    tail = "required" if required else "the default" if example == plain else f"default `{plain}`" if plain else ""
    what = f"{line}{', ' if tail else ''}{tail}. *{_kind(key)}.*"
    return [f"### {name}", "", *filled(f"{what} {key.get('description', '')}"), ""]


def _kind(key: Mapping[str, Any]) -> str:
    if key.get("examples"):
        return "time"
    if "anyOf" in key:
        return " or ".join(dict.fromkeys(_kind(part) for part in key["anyOf"] if part.get("type") != "null"))
    if "enum" in key or "const" in key:
        return " or ".join(f"`{word}`" for word in key.get("enum", [key.get("const")]))
    kind = key.get("type")
    if isinstance(kind, list):
        return " or ".join(kind)
    inner = key.get("items") or {}
    words = {
        "boolean": "true or false",
        "object": "mapping",
        "string": "text",
        "array": "list" + (f" of {_kind(inner)}" if inner and "$ref" not in str(inner) else ""),
        "integer": f"integer{_range(key)}",
        "number": f"number{_range(key)}",
    }
    return words.get(str(kind), "any value")


def _range(key: Mapping[str, Any]) -> str:
    low, above = key.get("minimum"), key.get("exclusiveMinimum")
    high, below = key.get("maximum"), key.get("exclusiveMaximum")
    start = f"from {low}" if low is not None else f"above {above}" if above is not None else ""
    end = f"below {below}" if below is not None else f"to {high:g}" if high is not None and high < _NO_LIMIT else ""
    return f" {start} {end}".rstrip() if start or end else ""
