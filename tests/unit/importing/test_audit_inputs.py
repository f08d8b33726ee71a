"""The 31 kinds of faults that an audit of real batch scripts has found: each is read right, or refused by its line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import UsageError
from clusterddp.importing.reading import Imported, import_files
from clusterddp.spec.load import load_spec
from tests.support.batch_scripts import all_scripts

G = "#!/bin/bash\n#SBATCH --gres=gpu:1\n"
B = "#!/bin/bash\n"


def imported(tmp_path: Path, text: str) -> Imported:
    (tmp_path / "train.slurm").write_text(text)
    return import_files([tmp_path / "train.slurm"])


def test_each_kind_is_also_a_script_that_is_submitted() -> None:
    kinds = {int(script.name[1:3]) for script in all_scripts() if re.match("k[0-9][0-9]-", script.name)}
    assert kinds == set(range(1, 32))


@pytest.mark.parametrize(
    ("text", "spec", "notes"),
    [
        pytest.param(
            G + "source settings.sh\nconda activate torch\npython train.py\n",
            {"entry.script": "train.py", "setup": ["source settings.sh", "conda activate torch"]},
            [],
            id="K1",
        ),
        pytest.param(
            B + "#SBATCH --nodes=1 --ntasks=16 --gres=gpu:1\npython train.py\n",
            {"resources.cpus_per_task": 16, "resources.gpus_per_node": 1},
            [],
            id="K3",
        ),
        pytest.param(
            G + "#SBATCH --array=0-99\npython worker.py --total 100\n",
            {"entry.args": ["--total", "100"]},
            ["the spec runs one task of it; a sweep runs many"],
            id="K4",
        ),
        pytest.param(
            G + "#SBATCH --requeue\n#SBATCH --time=1:00:00\nsrun python train.py\n",
            {"slurm.requeue": None, "resources.time": "1:00:00"},
            ["restarts: N starts the run again"],
            id="K5",
        ),
        pytest.param(
            B + "#SBATCH --gres=gpu:1 --time=10:00:00\n#SBATCH --signal=USR1@600\nsrun python train.py\n",
            {"slurm.signal": None},
            ["stop.lead sets the time", "the program gets no signal from Slurm"],
            id="K6",
        ),
        pytest.param(
            B + "#SBATCH --gres=gpu:4 --ntasks=1\n/opt/envs/nlp/bin/torchrun --nproc_per_node=4 train.py\n",
            {"resources.gpus_per_node": 4, "entry.script": "train.py", "python": "/opt/envs/nlp/bin/python3"},
            [],
            id="K10",
        ),
        pytest.param(
            G + "#SBATCH --chdir=/home/me/project\npython train.py\n",
            {"slurm.chdir": None},
            ["#SBATCH --chdir=/home/me/project  (submit from there"],
            id="K11",
        ),
        pytest.param(
            G + "python -m pip install -r r.txt\npython train.py\n",
            {"entry.script": "train.py"},
            ["python -m pip install -r r.txt  (a command other than the one that trains"],
            id="K12",
        ),
        pytest.param(
            G + "srun singularity run --nv img.sif python train.py\n",
            {"entry.command": ["singularity", "run", "--nv", "img.sif", "python", "train.py"]},
            [],
            id="K16",
        ),
        pytest.param(
            G + "unset PYTHONPATH LD_PRELOAD\nsrun python train.py\n",
            {"entry.script": "train.py", "setup": ["unset PYTHONPATH LD_PRELOAD"]},
            [],
            id="K17",
        ),
        pytest.param(
            G + "#SBATCH --dependency=singleton\nsrun python train.py\n",
            {"slurm.dependency": None},
            ["after: [RUN] waits for a run"],
            id="K18",
        ),
        pytest.param(
            G + "#SBATCH --mail-type=BEGIN\n#SBATCH --mail-type=FAIL\npython train.py\n",
            {"slurm.mail_type": "BEGIN,FAIL"},
            [],
            id="K19",
        ),
        pytest.param(
            B + "#SBATCH --gres=gpu:1 --mem=64gb\n#SBATCH --time=2880\npython train.py\n",
            {"resources.memory_gb": 64, "resources.time": "2-00:00"},
            [],
            id="K22",
        ),
    ],
)
def test_what_is_read_is_right(tmp_path: Path, text: str, spec: dict[str, Any], notes: list[str]) -> None:
    found = imported(tmp_path, text)
    resolved = load_spec(found.text, environ={})
    values = {change["key"]: change["value"] for change in resolved.changes()}
    assert {key: values.get(key) for key in spec} == spec
    assert [note for note in notes if note not in found.text] == []
    if not notes:
        assert [each for each in found.left if each.fate != "ours"] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            G + 'EPOCHS=100\nif [ "$DEBUG" = 1 ]; then\n  EPOCHS=1\n  export WANDB_MODE=disabled\nfi\n'
            "srun python train.py --epochs $EPOCHS\n",
            ":4: ; then: an operator of the shell",
            id="K2",
        ),
        pytest.param(
            B + "#SBATCH --nodes=2 --gres=gpu:4\nmpirun -np $((2 * 4)) python train.py\n", ":3: mpirun", id="K7"
        ),
        pytest.param(
            G + "export HF_TOKEN=hf_abcdefghijklmnop\npython train.py --token $HF_TOKEN\n",
            ":4: \\$HF_TOKEN: a shell computes it",
            id="K8",
        ),
        pytest.param(G + 'read -ra A <<< "$LIST"\nsrun python train.py\n', ":3: .*an operator of the shell", id="K9"),
        pytest.param(
            G + "python -m pip install -r requirements.txt\nllamafactory-cli train config.yaml\n",
            "has no plain command that starts Python",
            id="K12",
        ),
        pytest.param(
            G + "seed=0\nfor seed in 1 2 3; do\n  python train.py --seed $seed\ndone\n",
            ":4: .*an operator of the shell",
            id="K13",
        ),
        pytest.param(
            B + "#SBATCH --nodes=2 --ntasks-per-node=4 --gres=gpu:4\nmpirun python train_hvd.py\n",
            ":3: mpirun",
            id="K14",
        ),
        pytest.param(G + "RANK=16\npython train.py --lora_rank $RANK\n", ":4: \\$RANK: a shell computes it", id="K15"),
        pytest.param(G + "python train.py < cfg.txt\n", ":3: < cfg.txt: an operator of the shell", id="K20"),
        pytest.param(G + "python train.py --sep $'\\t'\n", ":3: .*a shell computes it", id="K21"),
        pytest.param(
            G + 'B=32\npython train.py --data $HOME/data --bs $((B * 4)) --cfg ${CFG:-"a.yaml"} "$@"\n',
            ":4: ",
            id="K23",
        ),
        pytest.param(
            G + 'singularity exec --nv --overlay env.ext3:ro --env A=1 img.sif bash -c "source /ext3/env.sh; '
            'python train.py"\n',
            ":3: .*-c in a command",
            id="K24",
        ),
        pytest.param(
            B + "#SBATCH --gres=gpu:8 --ntasks=1\n"
            "accelerate launch --config_file fsdp.yaml --num_processes 8 train.py\n",
            ":3: accelerate",
            id="K25",
        ),
        pytest.param(G + "cp -r data $SLURM_TMPDIR && python train.py\n", ":3: .*an operator of the shell", id="K26"),
        pytest.param(G + "declare -a X=(a b)\nsrun --nodelist=$L python train.py\n", ":3: ", id="K27-declare"),
        pytest.param(G + "srun --nodelist=$L python train.py\n", ":3: srun --nodelist=\\$L", id="K27"),
        pytest.param(G + 'CMD="python train.py --lr 0.1"\neval $CMD\n', ":4: eval \\$CMD: control flow", id="K28"),
        pytest.param(
            G + "srun --container-image=$PWD/img.sqsh --container-workdir=/w python train.py\n",
            ":3: srun --container-image",
            id="K29",
        ),
        pytest.param(
            G + "srun python preprocess.py\nsrun python train.py\n", ":4: .*line 3 is another command", id="K30"
        ),
        pytest.param(
            "sbatch <<EOF\n#!/bin/bash\n#SBATCH --gres=gpu:2 --ntasks-per-node=2\nsrun python train.py\nEOF\n",
            ":1: <<EOF: an operator of the shell",
            id="K31",
        ),
    ],
)
def test_what_is_not_plain_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        imported(tmp_path, text)
    assert re.search(message, caught.value.message), caught.value.message
    assert caught.value.hint == f"clusterddp submit {tmp_path / 'train.slurm'} runs it as it is"
