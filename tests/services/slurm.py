"""A Slurm of one node, in a folder of its own: its munge, its controller, its node daemon."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
from collections.abc import Generator
from pathlib import Path

from services.needs import needs, needs_root, program_path
from services.processes import free_port, server

_CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


_ATTEMPTS = 4  # another process may take a port that was free


@contextlib.contextmanager
def slurm(folder: Path, cpus: int = 2) -> Generator[dict[str, str]]:
    """A running Slurm; the environment in which its commands find it."""
    needs("munged", "slurmctld", "slurmd", "sbatch")
    needs_root()
    for attempt in range(_ATTEMPTS):
        with contextlib.ExitStack() as stack:
            (home := folder / str(attempt)).mkdir(mode=0o700)  # munged insists
            try:
                environment = _start(stack, home, cpus)
            except RuntimeError:
                if attempt + 1 == _ATTEMPTS:
                    raise
                continue
            yield environment
            return


def _start(stack: contextlib.ExitStack, folder: Path, cpus: int) -> dict[str, str]:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    controller, daemon, host = free_port(), free_port(), socket.gethostname().partition(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(folder=folder, host=host, cpus=cpus, controller=controller, daemon=daemon))
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    path = {name: str(program_path(name)) for name in ("munged", "slurmctld", "slurmd", "sinfo")}
    own = [
        f"--{name}={folder}/munge.{name.partition('-')[0]}"
        for name in ("socket", "key-file", "pid-file", "seed-file", "log-file")
    ]

    def idle() -> bool:
        told = subprocess.run(
            [path["sinfo"], "-h", "-o", "%T"], env=environment, capture_output=True, text=True
        )
        return told.stdout.strip() == "idle"

    for command, up in (
        ([path["munged"], "--foreground", "--force", *own], (folder / "munge.socket").exists),
        ([path["slurmctld"], "-D"], controller),
        ([path["slurmd"], "-D", "-N", host], idle),
    ):
        log = folder / f"{Path(command[0]).name}.log"
        stack.enter_context(server(command, up, log, env=environment))
    return environment
