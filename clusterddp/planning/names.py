"""Names of runs: `brisk-otter-3`, easy to say and to type, and distinct in a runs directory."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# 64 words each: short, plain, told apart by their first letters.
ADJECTIVES = _words(
    "agile amber ample ashen balmy blithe bold brave brisk bright calm candid clever cosmic crisp curly "
    "dapper daring deft dewy eager early fabled fair fancy fleet fond frank gentle giddy glad golden "
    "hardy hazel honest humble jolly keen kind lively lucid lunar mellow merry mild misty nimble noble "
    "plucky polar proud quick quiet rapid rosy rustic silver snug solar spry steady sunny swift tidy"
)
ANIMALS = _words(
    "adder badger bear beaver bison bobcat camel caribou civet condor coyote crane curlew dingo dolphin eagle "
    "egret falcon ferret finch fox gazelle gecko gibbon goose grouse hare heron hornet ibex ibis iguana "
    "jackal jaguar kestrel koala lark lemur llama lynx magpie marmot marten mink moose newt ocelot orca "
    "osprey otter owl panda pelican puffin quail raven robin salmon seal stoat swan tapir walrus wombat"
)


def choose_run_name(
    runs_dir: Path, *, adjectives: tuple[str, ...] = ADJECTIVES, animals: tuple[str, ...] = ANIMALS
) -> str:
    """Choose a name that nothing in `runs_dir` has; another submit may still take it before it is used."""
    try:
        taken = set(os.listdir(runs_dir))
    except OSError:
        taken = set()
    while True:
        name = f"{secrets.choice(adjectives)}-{secrets.choice(animals)}-{secrets.randbelow(99) + 1}"
        if name not in taken:
            return name
