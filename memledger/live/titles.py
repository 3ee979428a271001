"""What a process of SGLang or vLLM is called: by the title it gave itself, by its command line, or by the first 15 characters of its name.

SGLang titles its children `sglang::...` (0.4.2 on), vLLM its own `VLLM::...` (0.10.1 on, with setproctitle installed), after
`VLLM_PROCESS_NAME_PREFIX` where that is set. The launcher keeps the command line as it was typed. Children without a title show
Python's `multiprocessing` command line, or a copy of the launcher's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Final, Literal

import msgspec

from memledger.live.sample import Role
from memledger.sanitize import MASK, clean, mask_secrets

Framework = Literal["sglang", "vllm"]

COMM_LENGTH: Final = 15
"""Linux cuts a process's name (`comm`) to this many characters."""

LONGEST_ARGUMENT: Final = 2000


class Title(msgspec.Struct, frozen=True):
    """What a title or a command line says of its process."""

    framework: Framework
    role: Role
    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    ep: int | None = None


# Rank parts of a title, the longer names first: `_MOE_DP0` holds no data-parallel rank.
_RANKS: Final = re.compile(r"[_ ](ATTN_CP|MOE_DP|PCP|DCP|DP|PP|TP|EP)(\d{1,5})(?![0-9A-Za-z])")

# What follows `sglang::`, in all versions; a title is matched from its start, so that rank parts may follow.
_SGLANG: Final[tuple[tuple[re.Pattern[str], Role], ...]] = (
    (re.compile(r"scheduler"), "scheduler"),
    (re.compile(r"detokenizer"), "detokenizer"),
    (re.compile(r"data_parallel_controller"), "coordinator"),
    (re.compile(r"tokenizer_worker"), "api_server"),
    (re.compile(r"http_server"), "launcher"),  # 0.5.2 only: the main process itself
    (re.compile(r"server"), "launcher"),  # started by sglang_router.launch_server
)

# What follows `VLLM::`. 0.10.1 calls engines `DPEngineCore_0`, and workers by their engine's title with a rank part behind it.
_VLLM: Final[tuple[tuple[re.Pattern[str], Role], ...]] = (
    (re.compile(r"Worker"), "worker"),
    (re.compile(r"(?:DP)?EngineCore(?:_(?:DP)?\d+)?(?:_[A-Z]+\d+)*_TP\d+"), "worker"),
    (re.compile(r"(?:DP)?EngineCore"), "engine"),
    (re.compile(r"APIServer"), "api_server"),
    (re.compile(r"DPCoordinator"), "coordinator"),
    (re.compile(r"DPSupervisor"), "coordinator"),
)
_VLLM_ENGINE_RANK: Final = re.compile(r"(?:DP)?EngineCore_(\d+)(?![0-9A-Za-z])")
_VLLM_DP_RANK: Final = re.compile(r"APIServer_DPRank_(\d+)")
_RAY_VLLM: Final = re.compile(r"ray::(?:RayWorkerWrapper|RayWorkerProc|(?:DPMoE)?EngineCoreActor)")

# The same names cut to 15 characters, where nothing but `comm` can be read. Rank parts are cut off with them.
_CUT: Final[dict[str, Title]] = {
    "sglang::schedul": Title("sglang", "scheduler"),
    "sglang::detoken": Title("sglang", "detokenizer"),
    "sglang::data_pa": Title("sglang", "coordinator"),
    "sglang::tokeniz": Title("sglang", "api_server"),
    "sglang::http_se": Title("sglang", "launcher"),
    "sglang::server": Title("sglang", "launcher"),
    "VLLM::EngineCor": Title("vllm", "engine"),
    "VLLM::DPEngineC": Title("vllm", "engine"),
    "VLLM::Worker": Title("vllm", "worker"),
    "VLLM::APIServer": Title("vllm", "api_server"),
    "VLLM::DPCoordin": Title("vllm", "coordinator"),
    "VLLM::DPSupervi": Title("vllm", "coordinator"),
}

_PYTHON: Final = re.compile(r"(?:python|pypy)[\d.]*(?:-\S*)?$")
_MODULES: Final[dict[str, Framework]] = {
    "sglang.launch_server": "sglang",
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "vllm.entrypoints.grpc_server": "vllm",
}
_MAIN_MODULES: Final[dict[str, Framework]] = {
    "vllm": "vllm",
    "vllm.entrypoints.cli.main": "vllm",
    "sglang": "sglang",
    "sglang.cli.main": "sglang",
}
_SCRIPTS: Final[tuple[tuple[re.Pattern[str], Framework], ...]] = (
    (re.compile(r"(?:^|/)sglang/launch_server\.py$"), "sglang"),
    (re.compile(r"(?:^|/)vllm/entrypoints/(?:openai/)?api_server\.py$"), "vllm"),
)
_SPAWNED: Final = re.compile(r"from multiprocessing\.(?:spawn|forkserver) import ")
_TRACKER: Final = re.compile(r"from multiprocessing\.resource_tracker import ")
_SHELLS: Final = frozenset(
    re.findall(
        r"\S+",
        """sh bash dash zsh fish ksh ash busybox tini dumb-init docker-init catatonit s6-supervise supervisord runsv uv uvx pixi conda
        mamba poetry pipenv env nohup setsid timeout nice ionice chrt taskset numactl sudo su doas runuser stdbuf unbuffer script time
        watch tmux screen srun slurmstepd mpirun mpiexec torchrun nsys ncu rocprof make just xargs parallel""",
    )
)
_PYTHON_WITH_VALUE: Final = frozenset({"-W", "-X", "--check-hash-based-pycs"})


def read_title(title: str, children_of: Framework | None = None) -> Title | None:
    """What a retitled process is; None where the title is no engine's.

    `children_of`: the framework of the server above it, which vouches for a prefix of the user's own (VLLM_PROCESS_NAME_PREFIX).
    """
    title = title.strip()
    if title.startswith("sglang::"):
        rest = title[len("sglang::") :]
        role = _role(_SGLANG, rest)
        return Title("sglang", role, **_ranks(rest)) if role else Title("sglang", "helper")
    if _RAY_VLLM.match(title):
        return Title("vllm", "engine" if "EngineCore" in title else "worker", **_ranks(title))
    prefix, colons, rest = title.partition("::")
    if not colons or not (prefix == "VLLM" or children_of == "vllm"):
        return None
    role = _role(_VLLM, rest)
    if role is None:
        return Title("vllm", "helper") if prefix == "VLLM" else None
    ranks = _ranks(rest)
    if (found := _VLLM_ENGINE_RANK.match(rest) or _VLLM_DP_RANK.match(rest)) and "dp" not in ranks:
        ranks["dp"] = int(found.group(1))
    return Title("vllm", role, **ranks)


def _role(names: Sequence[tuple[re.Pattern[str], Role]], rest: str) -> Role | None:
    return next((role for pattern, role in names if pattern.match(rest)), None)


def _ranks(text: str) -> dict[str, int]:
    found = {name: int(number) for name, number in _RANKS.findall(text)}
    return {name.lower(): found[name] for name in ("DP", "PP", "TP", "EP") if name in found}


def read_comm(comm: str) -> Title | None:
    """What a process is by its name cut to 15 characters; its rank may be cut off and is then unknown."""
    if len(comm) < COMM_LENGTH:
        return read_title(comm)
    return next((title for start, title in _CUT.items() if comm.startswith(start)), None)


def read_command(arguments: Sequence[str]) -> Framework | None:
    """The framework that a command line launches a server of; None where it is another program.

    A shell or a wrapper (`bash -c "vllm serve ..."`, `uv run sglang serve ...`) is not the server: its child is.
    """
    words = [word for word in arguments if word]
    if not words:
        return None
    first = PurePosixPath(words[0]).name
    if first in {"vllm", "sglang"}:
        return first if words[1:2] == ["serve"] else None  # type: ignore[return-value]
    if not _PYTHON.match(first):
        return None
    module, script, rest = _python_target(words)
    if module is not None:
        if module in _MODULES:
            return _MODULES[module]
        return _MAIN_MODULES.get(module) if rest[:1] == ["serve"] else None
    if script is None:
        return None
    name = PurePosixPath(script).name
    if name in {"vllm", "sglang"}:
        return name if rest[:1] == ["serve"] else None  # type: ignore[return-value]
    return next((framework for pattern, framework in _SCRIPTS if pattern.search(script)), None)


def _python_target(words: Sequence[str]) -> tuple[str | None, str | None, list[str]]:
    """What a Python command line runs: a module, or a script, with the arguments behind it."""
    position = 1
    while position < len(words):
        word = words[position]
        if word == "-m":
            return (words[position + 1] if position + 1 < len(words) else None), None, list(words[position + 2 :])
        if word.startswith("-m") and not word.startswith("--"):
            return word[2:], None, list(words[position + 1 :])
        if word == "-c":
            return None, None, []
        if word in _PYTHON_WITH_VALUE:
            position += 2
            continue
        if not word.startswith("-"):
            return None, word, list(words[position + 1 :])
        position += 1
    return None, None, []


def is_spawned(arguments: Sequence[str]) -> bool:
    """Whether this is a child that Python's `multiprocessing` started (its work is not in its command line)."""
    return any(_SPAWNED.match(word) for word in arguments[1:6])


def is_tracker(arguments: Sequence[str]) -> bool:
    """Whether this is `multiprocessing`'s resource tracker, which every server has and which holds nothing."""
    return any(_TRACKER.match(word) for word in arguments[1:6])


def is_shell(arguments: Sequence[str], comm: str) -> bool:
    """Whether this is a shell, an init or a wrapper: something that starts a server and is none."""
    name = PurePosixPath(arguments[0]).name.lstrip("-") if arguments else comm
    return name in _SHELLS or comm in _SHELLS


def shown_arguments(arguments: Sequence[str]) -> tuple[str, ...]:
    """A command line fit to be kept: cleaned, secrets masked, also where flag and value are words of their own."""
    shown: list[str] = []
    hidden = False
    for word in arguments:
        if word.startswith("-"):
            hidden = False
        if hidden:
            shown.append(MASK)
            continue
        shown.append(clean(word, LONGEST_ARGUMENT))
        if word.startswith("-") and "=" not in word:
            hidden = mask_secrets(f"{word} x0x0x0x0") != f"{word} x0x0x0x0"
    return tuple(shown)


def flags(arguments: Sequence[str]) -> dict[str, str | bool]:
    """The flags of a launcher's command line: names with underscores, without dashes; a flag without a value is True."""
    found: dict[str, str | bool] = {}
    for name, value in _flag_pairs(arguments):
        if not (value is True and name in found):
            found[name] = value
    return found


def _flag_pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str | bool]]:
    name: str | None = None
    for word in arguments:
        if re.match(r"--?[A-Za-z]", word):
            if name is not None:
                yield name, True
            head, equals, value = word.lstrip("-").partition("=")
            name = head.replace("-", "_")
            if equals:
                yield name, value
                name = None
        elif name is not None:
            yield name, word
            name = None
    if name is not None:
        yield name, True


def served_model(framework: Framework, arguments: Sequence[str]) -> str | None:
    """The model that a launcher's command line names; None where it names none (a `--config` file may)."""
    given = flags(arguments)
    names = ("model_path", "model") if framework == "sglang" else ("model",)
    for name in names:
        if isinstance(value := given.get(name), str):
            return clean(value, LONGEST_ARGUMENT)
    if "serve" in arguments:
        behind = arguments[list(arguments).index("serve") + 1 :]
        if behind and not behind[0].startswith("-"):
            return clean(behind[0], LONGEST_ARGUMENT)
    return None


def is_python(arguments: Sequence[str]) -> bool:
    """Whether a command line runs a Python interpreter."""
    return bool(arguments) and bool(_PYTHON.match(PurePosixPath(arguments[0]).name))
