"""Commands that translate files of other launchers to specs and back: import, manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from clusterddp.cli.arguments import KeyValue, SpecPath, command
from clusterddp.cli.login import profile_option
from clusterddp.cli.terminal import Terminal, put, say
from clusterddp.errors import UsageError

if TYPE_CHECKING:
    from clusterddp.importing.reading import Kind

_KINDS = click.Choice(["slurm", "gluoncv", "accelerate", "hostfile", "env"])


@command("import")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--from", "kind", type=_KINDS, help="The kind of FILE, where its content does not show it.")
@click.option("--line", type=click.IntRange(min=1), help="Of a batch script: the line of the command that trains.")
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the spec to PATH, not to stdout.",
)
@click.option("--force", is_flag=True, help="Overwrite PATH when it exists.")
@click.pass_obj
def import_(
    terminal: Terminal, *, files: tuple[Path, ...], kind: str | None, line: int | None, output: Path | None, force: bool
) -> None:
    """Write a spec from files of other launchers; nothing in them is executed.

    A Slurm batch script, GluonCV's DDP_CONFIG, an Accelerate config, a hostfile (DeepSpeed, Horovod, mpirun), a
    .deepspeed_env. What the spec cannot express is listed with its line and the reason, also in the spec's comments.

    \b
    clusterddp import train.slurm > job.yaml
    clusterddp import train.slurm -o job.yaml && clusterddp submit job.yaml -n
    clusterddp import hostfile .deepspeed_env      hosts and variables, in one spec
    """
    from clusterddp.importing.reading import HEADINGS, import_files, spell
    from clusterddp.system.files import write_text

    imported = import_files(files, kind=cast("Kind | None", kind), line=line)
    if output is None:
        put(imported.text.rstrip("\n"))
    elif not write_text(output, imported.text, exclusive=not force) and not force:
        raise UsageError(f"{output}: exists, and is left as it is", hint="give another path, or --force")
    for fate, heading in HEADINGS.items():
        lines = [f"  {spell(each)}" for each in imported.left if each.fate == fate]
        if lines:
            say("\n".join([f"{heading}:", *lines]))
    if output is not None:
        say(f"wrote {output}")


@command("manifest")
@click.argument("spec", type=SpecPath())
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, type=KeyValue())
@click.option("--image", required=True, metavar="IMAGE", help="With Python, torch, clusterddp and your code.")
@click.option("--workdir", metavar="DIR", default="/workspace", show_default=True, help="Where the code is in it.")
@click.option("--claim", metavar="NAME", help="Volume claim (ReadWriteMany) for the runs; without: gone with the pods.")
@profile_option
@click.pass_obj
def manifest(
    terminal: Terminal,
    *,
    spec: Path | str,
    overrides: tuple[str, ...],
    image: str,
    workdir: str,
    claim: str | None,
    profile: str | None,
) -> None:
    """Print a Kubeflow PyTorchJob that runs a spec: a pod for each node, torchrun in it, a rank for each process.

    \b
    clusterddp manifest job.yaml --image registry/train:1 --claim runs | kubectl apply -f -
    """
    from clusterddp.importing.manifest import write_manifest
    from clusterddp.spec.load import load_spec
    from clusterddp.spec.yamlfile import resolved_yaml

    resolved = load_spec(spec, overrides, profile=profile, environ=terminal.environ)
    text = resolved_yaml(resolved.job)
    put(write_manifest(resolved.job, text, image=image, workdir=workdir, claim=claim).rstrip("\n"))


COMMANDS = {"import": import_, "manifest": manifest}
