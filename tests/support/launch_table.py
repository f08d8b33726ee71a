"""The table of docs/launchers.md as data: the ways of starting DDP that people come from, and what they type here.

A command stands here as it is typed; test_launch_table.py and test_launch_table_rack.py type it.
"""

from __future__ import annotations

from tests.support.launch_cells import Row, Where, bare, local, machines, slurm, ssh, submitted

AS_ANY = "as torchrun"
TORCHRUN = "torchrun --standalone --nproc-per-node 2 -m clusterddp worker job.yaml"
ON_NODE = "torchrun --nnodes 2 --node-rank={} --nproc-per-node 1 --master-addr node1 --master-port 29511"
IN_POD = "PET_NNODES=2 PET_NODE_RANK={} PET_MASTER_ADDR=node1 PET_MASTER_PORT=29511"
BY_HAND = "RANK={} WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29511 clusterddp worker job.yaml"


def from_python(*arguments: str) -> str:
    words = ", ".join(("job.fit", *arguments, "args=[1]", "base='job.yaml'"))
    return f'python -c "import clusterddp, job; print(clusterddp.submit({words}).wait())"'


ROWS = (
    Row(
        key="torchrun",
        title="`torchrun`, `python -m torch.distributed.run`",
        spec="entry: {script: train.py}",
        cells=(
            *submitted(),
            slurm(
                "srun -w node1,node2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d"
                " --rdzv-endpoint node1:29533 --rdzv-id 7 -m clusterddp worker job.yaml"
            ),
            bare(TORCHRUN),
            bare("python -m torch.distributed.run --standalone --nproc-per-node 2 -m clusterddp worker job.yaml"),
            machines(*(f"{ON_NODE.format(rank)} -m clusterddp worker job.yaml" for rank in (0, 1))),
        ),
        none={},
    ),
    Row(
        key="own-torchrun",
        title="`torchrun` goes on starting the ranks",
        spec="resources: {nodes: 2, procs_per_node: 2}\nentry: {command: [torchrun, train.py], owns_ranks: true}",
        cells=(
            local("clusterddp submit job.yaml --launcher local --wait", ranks_per_node=2),
            ssh("git init -q && clusterddp submit job.yaml --launcher ssh --wait", ranks_per_node=2),
            slurm("clusterddp submit job.yaml --launcher slurm --wait", ranks_per_node=2),
        ),
        none={"bare": AS_ANY},
    ),
    Row(
        key="srun",
        title="`srun` inside `salloc`",
        spec="entry: {script: train.py}",
        cells=(slurm("salloc -N2 -n2 srun clusterddp worker job.yaml"),),
        none={"local": AS_ANY, "ssh": AS_ANY, "bare": "srun is Slurm's"},
    ),
    Row(
        key="openmpi",
        title="`mpirun` of Open MPI",
        spec="entry: {script: train.py}",
        cells=(
            slurm("salloc -N2 -n2 mpirun.openmpi clusterddp worker job.yaml"),
            bare("mpirun.openmpi --oversubscribe -n 2 clusterddp worker job.yaml"),
            bare(
                "mpirun.openmpi --host node1,node2 --wdir /root/work clusterddp worker job.yaml",
                where=Where.LAPTOP,
                nodes=2,
                ranks_per_node=1,
            ),
        ),
        none={"local": AS_ANY, "ssh": AS_ANY},
    ),
    Row(
        key="mpich",
        title="`mpirun` of MPICH",
        spec="entry: {script: train.py}",
        cells=(
            slurm("salloc -N2 -n2 mpirun.mpich clusterddp worker job.yaml"),
            bare("mpirun.mpich -n 2 clusterddp worker job.yaml"),
            bare(
                "mpirun.mpich -hosts node1,node2 -genv MASTER_ADDR node1 -wdir /root/work clusterddp worker job.yaml",
                where=Where.LAPTOP,
                nodes=2,
                ranks_per_node=1,
            ),
        ),
        none={"local": AS_ANY, "ssh": AS_ANY},
    ),
    Row(
        key="spawn",
        title="`mp.spawn` in the script",
        spec="resources: {nodes: 2, procs_per_node: 2}\n"
        "entry: {script: spawning.py, owns_ranks: true, args: [--nprocs, '{procs_per_node}']}",
        cells=(*submitted(ranks_per_node=2), machines("clusterddp worker job.yaml", ranks_per_node=2)),
        none={},
    ),
    Row(
        key="gluoncv",
        title="GluonCV's `DDP_CONFIG`",
        cells=(
            ssh("git init -q && clusterddp import ddp.yaml -o mine.yaml && clusterddp submit mine.yaml --cpu --wait"),
            slurm(
                "clusterddp import ddp.yaml -o mine.yaml &&"
                " clusterddp submit mine.yaml --launcher slurm 'slurm.nodelist=\"node1,node2\"' --cpu --wait"
            ),
            machines("clusterddp import ddp.yaml -o mine.yaml && clusterddp worker mine.yaml --cpu"),
        ),
        none={"local": "its file names two machines by address, and its script goes by them"},
        knows_place=False,
    ),
    Row(
        key="modelarts",
        title="ModelArts' `--init_method --rank --world_size --data_url --output_dir`",
        spec="ssh: {hosts: [node1, node2], send: {data: ~/slope}}\n"
        'entry: {script: modelarts.py, data_dir: data, args: [--init_method, "{init_method}", --rank, "{rank}",'
        ' --world_size, "{world_size}", --data_url, "{data_dir}", --output_dir, "{output_dir}"]}',
        cells=(*submitted(ssh_more=" entry.data_dir=~/slope"), bare(TORCHRUN)),
        none={},
        result="result.json",
        knows_place=False,
    ),
    Row(
        key="by-hand-tcp",
        title="`init_process_group` by hand, `tcp://`",
        spec='network: {init: tcp}\nentry: {script: by_hand.py, args: ["{init_method}", "{rank}", "{world_size}"]}',
        cells=(*submitted(), machines(*(BY_HAND.format(rank) for rank in (0, 1)))),
        none={},
        says="met by tcp",
        knows_place=False,
    ),
    Row(
        key="by-hand-file",
        title="`init_process_group` by hand, `file://`",
        spec='network: {init: file}\nentry: {script: by_hand.py, args: ["{init_method}", "{rank}", "{world_size}"]}',
        cells=(submitted()[0], submitted()[2], bare(TORCHRUN)),
        none={"ssh": "no file that hosts over SSH share: the spec is refused"},
        says="met by file",
        knows_place=False,
    ),
    Row(
        key="trainer-file",
        title="the built-in trainer, meeting by a file",
        spec="network: {init: file}\n"
        "train: {dataset: shapes, samples: 64, model: fastnet, width: 0.125, batch_size: 8, max_steps: 1}",
        cells=(submitted()[0], submitted()[2]),
        none={"ssh": "as above", "bare": "as above, with `tcp`"},
        trains=True,
    ),
    Row(
        key="trainer-tcp",
        title="the built-in trainer, meeting by `tcp://`",
        spec="network: {init: tcp}\n"
        "train: {dataset: shapes, samples: 64, model: fastnet, width: 0.125, batch_size: 8, max_steps: 1}",
        cells=(submitted()[1], bare(TORCHRUN)),
        none={"local": "as over ssh", "slurm": "as over ssh"},
        trains=True,
    ),
    Row(
        key="launch",
        title="`torch.distributed.launch` and its `--local_rank`",
        spec='entry: {script: launched.py, args: ["--local_rank={local_rank}", --lr, 0.1]}',
        cells=(
            *submitted(),
            bare(
                "python -m torch.distributed.launch --standalone --use-env --nproc-per-node 2"
                " -m clusterddp worker job.yaml"
            ),
        ),
        none={},
        says="lr 0.1",
    ),
    Row(
        key="kubeflow",
        title="Kubeflow's PyTorchJob (its variables, on two hosts)",
        spec="entry: {script: train.py}",
        cells=(
            machines(*(f"{IN_POD.format(rank)} clusterddp worker job.yaml" for rank in (0, 1))),
            machines(
                *(
                    f"{IN_POD.format(rank)} PET_NPROC_PER_NODE=1 torchrun -m clusterddp worker job.yaml"
                    for rank in (0, 1)
                )
            ),
        ),
        none=dict.fromkeys(("local", "ssh", "slurm"), AS_ANY),
    ),
    Row(
        key="batch",
        title="a batch script, `train.slurm`",
        cells=(
            local("clusterddp submit train.slurm --launcher local --cpu --wait", bonus=1),
            ssh(
                "clusterddp import train.slurm -o mine.yaml && clusterddp submit mine.yaml --hosts node1,node2 --wait",
                bonus=1,
            ),
            slurm("clusterddp submit train.slurm --wait", bonus=1),
        ),
        none={"bare": AS_ANY},
    ),
    Row(
        key="hostfile",
        title="a hostfile of DeepSpeed's or Horovod's, `.deepspeed_env`",
        spec="entry: {script: train.py}",
        cells=(
            ssh("clusterddp submit job.yaml --hostfile hostfile --wait"),
            ssh("clusterddp submit job.yaml --hosts node1:1,node2:1 --cpu --wait"),
            ssh(
                "clusterddp import hostfile .deepspeed_env -o mine.yaml && clusterddp submit mine.yaml --cpu --wait",
                bonus=1,
            ),
            machines(
                "clusterddp import hostfile .deepspeed_env -o mine.yaml && clusterddp worker mine.yaml --cpu", bonus=1
            ),
        ),
        none={"local": "its hosts are other machines", "slurm": "Slurm chooses the hosts"},
    ),
    Row(
        key="python",
        title="a function, from Python",
        cells=(
            local(from_python(), bonus=1),
            ssh("git init -q && " + from_python("hosts=['node1', 'node2']"), bonus=1),
            slurm(from_python("['launcher=slurm']"), bonus=1),
        ),
        none={"bare": "`submit` starts the ranks; `entry: {function: ...}` is for `worker`, too"},
    ),
)
