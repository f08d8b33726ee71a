"""nvidia-smi of a private host: answers `-L`, `--query-gpu=` and `--query-compute-apps=` from a file (see gpus.py)."""

import argparse
import json
import sys
from pathlib import Path

STATE = Path("/var/lib/rack-gpus.json")
UNKNOWN = "[N/A]"


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-L", "--list-gpus", action="store_true")
    parser.add_argument("-i", "--id", default="")
    parser.add_argument("--query-gpu")
    parser.add_argument("--query-compute-apps")
    parser.add_argument("--format", default="csv")
    options = parser.parse_args()
    try:
        gpus = json.loads(STATE.read_text())
    except ValueError:
        print("Failed to initialize NVML: Driver/library version mismatch")
        return 18
    if options.id:
        gpus = [gpu for gpu in gpus if {str(gpu["index"]), gpu["uuid"]} & set(options.id.split(","))]
    if options.list_gpus:
        for gpu in gpus:
            print(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})")
        return 0
    if not gpus:
        print("No devices were found")
        return 6
    return answer_query(gpus, options)


def answer_query(gpus, options):
    unit = "" if "nounits" in options.format else " MiB"
    if options.query_gpu:
        fields, rows = options.query_gpu.split(","), [about_gpu(gpu, unit) for gpu in gpus]
    elif options.query_compute_apps:
        fields = options.query_compute_apps.split(",")
        rows = [about_app(gpu, pid, unit) for gpu in gpus for pid in gpu["apps"]]
    else:
        sys.exit("the rack's nvidia-smi knows -L, --query-gpu= and --query-compute-apps= only")
    if "noheader" not in options.format:
        print(", ".join(fields))
    for row in rows:
        print(", ".join(row.get(field.strip(), UNKNOWN) for field in fields))
    return 0


def about_gpu(gpu, unit):
    used = 512 * len(gpu["apps"])
    return {
        "index": str(gpu["index"]),
        "uuid": gpu["uuid"],
        "name": gpu["name"],
        "driver_version": gpu["driver"],
        "compute_cap": "9.0",
        "compute_mode": "Default",
        "mig.mode.current": "Disabled",
        "memory.total": f"{gpu['memory_mb']}{unit}",
        "memory.used": f"{used}{unit}",
        "memory.free": f"{gpu['memory_mb'] - used}{unit}",
    }


def about_app(gpu, pid, unit):
    try:
        name = str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        name = "[Not Found]"
    return {
        "gpu_uuid": gpu["uuid"],
        "gpu_name": gpu["name"],
        "pid": str(pid),
        "process_name": name,
        "name": name,
        "used_gpu_memory": f"512{unit}",
        "used_memory": f"512{unit}",
    }


sys.exit(main())
