"""Commands that translate files of other launchers to specs and back: import, manifest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from clusterddp.cli.arguments import KeyValue, SpecPath, command, runs_option
from clusterddp.cli.login import profile_option
from clusterddp.cli.terminal import Terminal, put, say
from clusterddp.errors import RunNotFoundError, UsageError

if TYPE_CHECKING:
    from clusterddp.importing.reading import Kind

_KINDS = click.Choice(["slurm", "gluoncv", "accelerate", "hostfile", "env"])


@command("import")
@click.argument("files", metavar="FILE...|RUN", nargs=-1, required=True)
@click.option("--from", "kind", type=_KINDS, help="The kind of FILE, where its content does not show it.")
@click.option("--step", metavar="K", help="Of RUN: the step, where several have started ranks (status lists them).")
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Write the spec to PATH, not to stdout.",
)
@click.option("--force", is_flag=True, help="Overwrite PATH when it exists.")
@runs_option
@click.pass_obj
def import_(
    terminal: Terminal,
    *,
    files: tuple[str, ...],
    kind: str | None,
    step: str | None,
    output: Path | None,
    force: bool,
    runs_dir: Path,
) -> None:
    """Write a spec from files of other launchers, or of what a batch script has run; nothing is executed.

    FILE: a Slurm batch script of plain lines, GluonCV's DDP_CONFIG, an Accelerate config, a hostfile (DeepSpeed,
    Horovod, mpirun), a .deepspeed_env. RUN: a run of a batch script, of which a step becomes a spec. What the spec
    cannot express is listed with its line and the reason, also in the spec's comments.

    \b
    clusterddp import train.slurm > job.yaml
    clusterddp import train.slurm -o job.yaml && clusterddp submit job.yaml -n
    clusterddp import hostfile .deepspeed_env      hosts and variables, in one spec
    clusterddp submit train.slurm && clusterddp import @last     what its srun or torchrun has run
    """
    from clusterddp.importing.reading import HEADINGS, import_files, import_step, spell
    from clusterddp.run.find import find_run, is_run
    from clusterddp.system.files import write_text

    if step is not None or (kind is None and len(files) == 1 and is_run(files[0], runs_dir)):
        try:
            imported = import_step(find_run(runs_dir, files[0]), step)
        except RunNotFoundError as error:
            if step is not None:
                raise
            raise RunNotFoundError(f"{files[0]}: no such file, and {error.message}", hint=error.hint) from error
    else:
        imported = import_files([Path(file) for file in files], kind=cast("Kind | None", kind))
    output = None if output == Path("-") else output
    if output is None:
        put(imported.text.rstrip("\n"))
    elif not write_text(output, imported.text, exclusive=not force) and not force:
        raise UsageError(f"{output}: exists, and is left as it is", hint="give another path, or --force")
    # On a terminal the comments of the spec have said it.
    for fate, heading in HEADINGS.items() if output is not None or not sys.stdout.isatty() else ():
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
    clusterddp manifest job.yaml --image train:1 | kubectl apply -f -
    """
    from clusterddp.importing.manifest import write_manifest
    from clusterddp.spec.load import load_spec
    from clusterddp.spec.yamlfile import resolved_yaml

    resolved = load_spec(spec, overrides, profile=profile, environ=terminal.environ)
    text = resolved_yaml(resolved.job)
    put(write_manifest(resolved.job, text, image=image, workdir=workdir, claim=claim).rstrip("\n"))


COMMANDS = {"import": import_, "manifest": manifest}
