"""The spec's `notify` section: of which events of a run a message is sent, where to, and the rules between its keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from clusterddp.spec.entry_section import Command
from clusterddp.spec.fields import Matching, Word
from clusterddp.spec.scalars import problem, read_line, read_variable
from clusterddp.spec.section import Conflict, Section
from clusterddp.spec.tree import Scalar

if TYPE_CHECKING:
    from clusterddp.spec.model import JobSpec

_MAIL_TYPES = {"start": "BEGIN", "end": "END", "fail": "FAIL", "requeue": "REQUEUE"}
"""Our events, as Slurm's --mail-type names them; it has none for a hang."""


def read_events(value: object) -> object:
    """Accept one event in place of a list."""
    return [value] if isinstance(value, Scalar | str) else value


def read_webhook(value: object) -> str:
    """Read `${NAME}`; the text is not shown, since it may be an address, which is a secret."""
    named = re.fullmatch(r"\$\{([^{}]*)\}", read_line(value))
    if not named:
        raise problem(
            "not the name of a variable: expected ${NAME}; an address is a secret, and the run's files keep the spec",
            "export SLACK_URL=https://... in your shell, and write webhook: ${SLACK_URL}",
        )
    return f"${{{read_variable(named[1])}}}"


class NotifySpec(Section):
    """Messages about the run."""

    on: Annotated[
        tuple[Annotated[Literal["start", "end", "fail", "requeue", "hang"], Word], ...],
        BeforeValidator(read_events),
    ] = Field(
        default=("end",),
        min_length=1,
        description="Events: start (the ranks of an attempt run), end (the run has ended, however), fail (it has "
        "ended by a failure), requeue (an attempt has ended and the next one follows), hang (no rank makes progress).",
    )
    command: Command | None = Field(
        default=None,
        description="A program that is started, as a list of words or as text that is split as a shell would. Its "
        "environment has CLUSTERDDP_RUN, CLUSTERDDP_EVENT, CLUSTERDDP_STATE, CLUSTERDDP_REASON and more, its standard "
        "input the message as JSON. Over SSH it runs where you submit.",
    )
    webhook: Annotated[str, BeforeValidator(read_webhook), WithJsonSchema({"type": "string"})] | None = Field(
        default=None,
        description="${NAME}: the variable NAME of your environment has an http or https address, which gets a POST "
        "of JSON that Slack and Mattermost accept. The variable is passed like those under secrets.",
    )
    mail: (
        Annotated[str, Matching(r"^[A-Za-z0-9_.+][A-Za-z0-9_.+=-]*(@[A-Za-z0-9][A-Za-z0-9.-]*)?$", "an address")] | None
    ) = Field(
        default=None,
        description="An address or a user; on Slurm sbatch's mail-user, elsewhere sendmail sends it, over SSH "
        "where you submit.",
    )

    @property
    def mail_types(self) -> str:
        """The events as the value of Slurm's --mail-type."""
        return ",".join(_MAIL_TYPES[event] for event in dict.fromkeys(self.on) if event in _MAIL_TYPES)

    def argv(self, working_dir: Path) -> tuple[str, ...]:
        """Return the words of the command; a relative path of its program is one from `working_dir`."""
        if self.command is None:
            return ()
        program, *words = shlex.split(self.command) if isinstance(self.command, str) else self.command
        return (str(working_dir / Path(program).expanduser()) if "/" in program else program, *words)


def notify_conflicts(job: JobSpec) -> Iterator[Conflict]:
    """Find values of the notify section that conflict with each other or with Slurm's own mail."""
    notify = job.notify
    if notify is None:
        return
    if not (notify.command or notify.webhook or notify.mail):
        yield Conflict(keys=("notify",), message="names no command, webhook or mail, expected one of them or more")
    if notify.mail and job.launcher == "slurm":
        own = [name for name in ("mail_user", "mail_type") if name in job.slurm]
        if own:
            yield Conflict(keys=(f"slurm.{own[0]}",), message="notify.mail sets it, expected one of them")
        if not notify.mail_types:
            yield Conflict(
                keys=("notify.on", "notify.mail"),
                message="Slurm sends the mail, and knows no hang",
                hint="a command or a webhook is sent by clusterddp itself",
            )
