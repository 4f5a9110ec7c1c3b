"""Children that speak the lifeline protocol and compute nothing, for the tests of supervisor and engine_process."""
from __future__ import annotations

import os
import time
from pathlib import Path

from ipc.config import EngineConfig, FrontendSection, ModelSection
from ipc.model_config import ModelConfig
from ipc.model_source import ModelFiles
from ipc.system import is_running

ROLES = ("worker", "engine_core", "frontend")

_CHILD = '''
import os, signal, sys, time
ROLE, MODE, LOG = {role!r}, {mode!r}, {log!r}
if MODE == "slow import":
    open(LOG + ".importing", "w").write(str(os.getpid()))
    time.sleep(600)
if MODE == "crash":
    sys.exit(7)
from ipc import codec
if MODE == "other schema":
    codec.SCHEMA_HASH = b"other-id"
from ipc.lifeline import ChildLife
from ipc.messages import ConfigCore, ConfigFrontend, ConfigWorker, Shutdown

def note(text):
    with open(LOG, "a") as file:
        file.write(ROLE + " " + text + "\\n")

life = ChildLife.from_argv(ROLE)
if MODE == "garbage":
    life.lifeline.sock.sendall(b"x" * 64)
config = life.config({{"worker": ConfigWorker, "engine_core": ConfigCore, "frontend": ConfigFrontend}}[ROLE])
note("configured %s OMP=%s" % (type(config).__name__, os.environ["OMP_NUM_THREADS"]))
if MODE == "fail":
    life.fail("the weights are not there")
if MODE == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
life.phase("think", 1.0, 0.25, "thought")
if MODE != "never ready":
    life.ready("detail of " + ROLE)
while True:
    for _, message in life.lifeline.receive(block=True):
        if isinstance(message, Shutdown):
            note("shutdown")
            if MODE != "stubborn":
                os._exit(0)
    if life.lifeline.is_closed:
        life.exit_orphaned()
'''

_SUPERVISOR = '''
import sys
from ipc.supervisor import main
sys.exit(main(modules={modules!r}))
'''

_DRIVER = '''
import sys
import msgspec
from ipc.config import EngineConfig
from ipc.errors import ConfigError
from ipc.supervisor import Supervisor
config = msgspec.json.decode({config!r}, type=EngineConfig)
def report(name, event):
    print(type(event).__name__, name, *[getattr(event, f) for f in event.__struct_fields__], sep="|", flush=True)
sys.exit(Supervisor(config, report, modules={modules!r}).run())
'''


class Fakes:
    """Writes the fake modules into a folder, which must be on PYTHONPATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.modules = {role: f"fake_{role}" for role in ROLES}
        for role in ROLES:
            self.set(role, "normal")
        (folder / "fake_supervisor.py").write_text(_SUPERVISOR.format(modules=self.modules))

    def set(self, role: str, mode: str) -> None:
        (self.folder / f"fake_{role}.py").write_text(_CHILD.format(role=role, mode=mode, log=str(self.log)))

    def driver(self, config: EngineConfig) -> str:
        """A script that supervises the fakes and prints what is reported."""
        import msgspec
        path = self.folder / f"driver{len(list(self.folder.glob('driver*')))}.py"
        path.write_text(_DRIVER.format(config=msgspec.json.encode(config), modules=self.modules))
        return str(path)

    def notes(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def make_config(serve: bool = True, restart: bool = False, **options: object) -> EngineConfig:
    shape = ModelConfig("LlamaForCausalLM", vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                        num_attention_heads=1, num_key_value_heads=1, head_dim=8)
    return EngineConfig(model=ModelSection(files=ModelFiles("dummy", "", shape, "tiny")), serve=serve, restart=restart,
                        frontend=FrontendSection(port=0), **options)


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    """Those that are left."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def run_dirs(parent: str) -> list[str]:
    return [name for name in os.listdir(parent) if name.startswith("threefold-")]
