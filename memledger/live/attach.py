"""From any process of a server to the whole server: its processes and ranks, GPUs, log, port and what the port answers.

Everything is read: no ptrace, no signal, nothing written; the only requests go to the server's own port on loopback.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from memledger.live import endpoints as http
from memledger.live import gpus, logplace, metrics, titles
from memledger.live import process as proc
from memledger.live.sample import DeviceSample, Endpoint, LiveServer, Metrics, Process, Role
from memledger.live.titles import Framework, Title
from memledger.sanitize import clean

REMEDY: Final = "`memledger ps` lists the servers of this machine"

DEFAULT_PORTS: Final[dict[Framework, int]] = {"sglang": 30000, "vllm": 8000}
NAMES: Final[dict[Framework, str]] = {"sglang": "SGLang", "vllm": "vLLM"}

_FRONT_ROLES: Final[frozenset[Role]] = frozenset({"launcher", "api_server"})
_EPHEMERAL_FROM: Final = 32768


class AttachError(Exception):
    """The process is no server, or can't be told apart: one sentence with the remedy."""


class Tree(msgspec.Struct, frozen=True):
    """The processes of one server as scanned: the root first, each with what it is."""

    framework: Framework
    root: proc.Seen
    members: tuple[tuple[proc.Seen, Title], ...]
    orphans: bool = False


# --------------------------------------------------------------------------------------------------------- finding them


def find_servers(
    devices: DeviceSample | None = None,
    api_key: str | None = None,
    *,
    ask: bool = True,
    table: proc.Table | None = None,
) -> tuple[LiveServer, ...]:
    """Every SGLang and vLLM server of this machine, by process id.

    `devices` gives the GPUs of the ranks; `api_key` is sent to servers of our own user only; without `ask` no port is asked.
    """
    scan = table if table is not None else proc.table()
    return tuple(describe(scan, tree, devices, api_key, ask=ask, brief=True) for tree in trees(scan))


def describe(
    scan: proc.Table,
    tree: Tree,
    devices: DeviceSample | None = None,
    api_key: str | None = None,
    *,
    ask: bool = True,
    brief: bool = False,
) -> LiveServer:
    """One server of a scan. `api_key` is sent where the server belongs to our own user only; `brief` asks what a list needs."""
    key = api_key if api_key and proc.facts(tree.root.pid).uid == os.geteuid() else None
    server = _server(scan, tree, devices, key, ask=ask, brief=brief)
    if api_key and key is None:
        note = "the API key was not sent: the server belongs to another user (memledger explain --pid sends it)"
        server = msgspec.structs.replace(server, notes=(*server.notes, note))
    return server


def attach(
    pid: int, devices: DeviceSample | None = None, api_key: str | None = None, *, ask: bool = True
) -> LiveServer:
    """The server that a process belongs to, or that it started.

    Raises:
        AttachError: there is no such process, or it is no server; one sentence.
    """
    scan = proc.table()
    return _server(scan, tree_of(scan, pid), devices, api_key, ask=ask)


def tree_of(scan: proc.Table, pid: int) -> Tree:
    """The server that a process belongs to, or that it started.

    Raises:
        AttachError: there is no such process, or it is no server.
    """
    found = trees(scan)
    if pid not in scan.by_pid and (group := proc.thread_group(pid)) is not None:
        pid = group
    for tree in found:
        if any(one.pid == pid for one, _ in tree.members):
            return tree
    below = {one.pid for one in scan.tree(pid)}
    started = [tree for tree in found if tree.root.pid in below]
    if len(started) == 1:
        return started[0]
    one = scan.by_pid.get(pid)
    if len(started) > 1:
        named = ", ".join(f"{tree.root.pid} ({NAMES[tree.framework]})" for tree in started)
        what = proc.described(one) if one else ""
        raise AttachError(f"process {pid} ({what}) started {len(started)} servers: name one of {named}")
    if inside := [tree for tree in found if any(pid in proc.namespace_pids(m.pid)[1:] for m, _ in tree.members)]:
        tree = inside[0]
        raise AttachError(
            f"process {pid} is no server here, but inside a container it is one of {NAMES[tree.framework]}'s: "
            f"from the host it is memledger explain --pid {tree.root.pid}"
        )
    raise AttachError(_not_a_server(pid, one))


def _not_a_server(pid: int, one: proc.Seen | None) -> str:
    if one is None:
        where = " (in this container the host's process ids are not visible)" if proc.in_pid_namespace() else ""
        if not where and proc.processes_are_hidden():
            where = " that this user may see (/proc hides other users' processes)"
        return f"there is no process {pid}{where}; {REMEDY}"
    if one.zombie:
        return f"process {pid} ({clean(one.comm)}) is a zombie, what is left of a program that has ended; {REMEDY}"
    if one.unreadable:
        return f"process {pid} belongs to another user and can't be read: run memledger as that user, or with sudo; {REMEDY}"
    user = proc.facts(pid).user
    return f"process {pid} is {proc.described(one)}{f' of user {clean(user)}' if user else ''}, no SGLang or vLLM server; {REMEDY}"


def trees(scan: proc.Table) -> list[Tree]:
    """All servers in a scan: their launchers with everything below, and processes whose launcher is gone."""
    known = {pid: title for pid, one in scan.by_pid.items() if (title := _title(one))}
    roots = dict.fromkeys(_root(scan, known, scan.by_pid[pid]).pid for pid in sorted(known))
    found = [_tree(scan, known, scan.by_pid[pid]) for pid in roots]
    return sorted(_with_orphans_joined(found), key=lambda tree: tree.root.pid)


def _title(one: proc.Seen) -> Title | None:
    """What a process is by itself: by title, by the launcher's command line, or by its cut name."""
    if not one.arguments:
        return titles.read_comm(one.comm)
    if retitled := titles.read_title(one.arguments[0]):
        return retitled
    framework = titles.read_command(one.arguments)
    return Title(framework, "launcher") if framework else None


def _root(scan: proc.Table, known: Mapping[int, Title], one: proc.Seen) -> proc.Seen:
    """The topmost process of the same server: up through parents that are the server's own.

    A program that runs the engine itself (`LLM(...)`, `sgl.Engine(...)`) has no launcher's command line: it is the parent of
    titled processes.
    """
    framework = known[one.pid].framework
    top = one
    while (above := scan.parent(top)) is not None:
        title = known.get(above.pid)
        is_ours = title is not None and title.framework == framework
        if not is_ours and (_is_launcher(known, top) or not titles.is_spawned(above.arguments)):
            break
        top = above
    above = scan.parent(top)
    if above is not None and not _is_launcher(known, top) and _may_run_an_engine(above):
        return above
    return top


def _is_launcher(known: Mapping[int, Title], one: proc.Seen) -> bool:
    title = known.get(one.pid)
    return title is not None and title.role == "launcher"


def _may_run_an_engine(one: proc.Seen) -> bool:
    return (
        one.pid != 1
        and bool(one.arguments)
        and titles.is_python(one.arguments)
        and not titles.is_shell(one.arguments, one.comm)
    )


def _tree(scan: proc.Table, known: Mapping[int, Title], root: proc.Seen) -> Tree:
    framework = known[root.pid].framework if root.pid in known else _framework_below(scan, known, root)
    orphan = root.pid in known and known[root.pid].role != "launcher"
    members: list[tuple[proc.Seen, Title]] = []
    waiting: list[tuple[proc.Seen, Title | None]] = [(root, None)]
    while waiting:
        one, above = waiting.pop(0)
        title = _member(one, known.get(one.pid), above, framework)
        if above is not None and title.role == "launcher" and title.framework != framework:
            continue  # a server of the other engine, started by this one's program
        members.append((one, title))
        waiting = [(child, title) for child in scan.children(one.pid)] + waiting
    return Tree(framework, root, tuple(members), orphan)


def _framework_below(scan: proc.Table, known: Mapping[int, Title], root: proc.Seen) -> Framework:
    return next(known[one.pid].framework for one in scan.tree(root.pid) if one.pid in known)


def _member(one: proc.Seen, own: Title | None, above: Title | None, framework: Framework) -> Title:
    """What a process of a server is, with what it takes over from the one above: the root is its launcher."""
    if above is None:
        return own if own is not None else Title(framework, "launcher")
    if own is None and one.arguments:
        own = titles.read_title(one.arguments[0], framework)
    if own is None:
        return Title(framework, _untitled(one, above))
    if own.role == "launcher" and own.framework == framework:
        # A forked child without a title shows its parent's command line.
        return Title(framework, _below(above))
    if own.role == "worker" and own.dp is None and above.role == "engine":
        own = msgspec.structs.replace(own, dp=above.dp)
    return own


def _untitled(one: proc.Seen, above: Title) -> Role:
    if titles.is_tracker(one.arguments):
        return "helper"
    if titles.is_spawned(one.arguments):
        return _below(above)
    return "helper"


def _below(above: Title) -> Role:
    """Children without a title (vLLM up to 0.10.0, SGLang up to 0.4.1): an engine process, its workers, their helpers."""
    if above.framework == "sglang":
        return "other"
    return "engine" if above.role == "launcher" else "worker" if above.role == "engine" else "helper"


def _with_orphans_joined(found: Sequence[Tree]) -> list[Tree]:
    """Processes whose launcher is gone, those of one session as one server."""
    whole = [tree for tree in found if not tree.orphans]
    groups: dict[tuple[Framework, int | None], Tree] = {}
    for tree in found:
        if tree.orphans:
            key = (tree.framework, proc.session(tree.root.pid) or tree.root.pid)
            before = groups.get(key)
            groups[key] = msgspec.structs.replace(before, members=before.members + tree.members) if before else tree
    return whole + list(groups.values())


# ------------------------------------------------------------------------------------------------------ describing them


def _server(
    scan: proc.Table,
    tree: Tree,
    devices: DeviceSample | None,
    api_key: str | None,
    *,
    ask: bool,
    brief: bool = False,
) -> LiveServer:
    root = tree.root
    missing: dict[str, str] = {}
    notes: list[str] = []
    container = _container(tree)
    flags = titles.flags(root.arguments)
    environment = _environment(tree)
    processes = _placed(tree, _processes(tree, container), devices, environment, flags, container)
    address = _address(tree, flags, container, missing, notes)
    answers: tuple[Endpoint, ...] = ()
    if ask and address is not None:
        answers = http.ask_all(tree.framework, msgspec.structs.replace(address, key=api_key), brief=brief)
    usage, by_engine = _usage(tree.framework, answers)
    if tree.orphans:
        notes.append(_orphans(scan, tree))
    if not proc.is_same(root.pid, root.created):
        notes.append(f"process {root.pid} ended while it was looked at: what is shown is what could still be read")
    if environment is None:
        missing["visible_devices"] = f"the environment of process {root.pid} can't be read"
    if usage is None and ask and address is not None:
        missing["metrics"] = _why_no_usage(answers)
    model = _model(tree, answers)
    if model is None:
        missing["model"] = "neither the command line nor the server's answers name it"
    return LiveServer(
        pid=root.pid,
        framework=tree.framework,
        framework_version=_version(tree, answers),
        model=model,
        started_at=proc.moment(root.created),
        processes=processes,
        container=container,
        log=logplace.log_place(
            tree.framework, [one.pid for one, title in tree.members if title.role != "helper"], container
        ),
        host=address.host if address else None,
        port=address.port if address else _asked_port(flags),
        visible_devices=_shown(environment, "CUDA_VISIBLE_DEVICES"),
        device_order=_shown(environment, "CUDA_DEVICE_ORDER"),
        endpoints=answers,
        metrics=usage,
        metrics_by_engine=by_engine,
        notes=tuple(notes),
        missing=missing,
    )


def _orphans(scan: proc.Table, tree: Tree) -> str:
    root = tree.root
    pids = ", ".join(str(one.pid) for one, _ in tree.members[:8])
    if root.title.startswith("ray::"):
        return f"these are workers that Ray runs (pid {pids}); the server that they belong to is not above them"
    if root.parent and root.parent not in scan.by_pid:
        return f"process {root.parent}, which started these processes (pid {pids}), can't be seen by this user"
    return f"the launcher of these processes is gone: they are left over from a server that died, and may hold its memory (pid {pids})"


def _shown(environment: Mapping[str, str] | None, name: str) -> str | None:
    value = environment.get(name) if environment else None
    return clean(value) if value is not None else None


def _container(tree: Tree) -> str | None:
    for one, _ in tree.members[:3]:
        text = proc.cgroup(one.pid)
        found = proc.container_of(text)
        if found is not None and found != proc.container_of(proc.cgroup(os.getpid())):
            return found
    return None


def _environment(tree: Tree) -> dict[str, str] | None:
    """The server's environment: the launcher's, or a helper's who inherited it where a title has overwritten the launcher's."""
    root = tree.root
    if "::" not in root.title and (own := proc.environment(root.pid)) is not None:
        return own
    others = (proc.environment(one.pid) for one, _ in tree.members if "::" not in one.title)
    return next((found for found in others if found), None)


def _processes(tree: Tree, container: str | None) -> tuple[Process, ...]:
    return tuple(_process(one, title, container) for one, title in tree.members)


def _process(one: proc.Seen, title: Title, container: str | None) -> Process:
    facts = proc.facts(one.pid)
    retitled = title.role != "launcher" and "::" in one.title
    missing = dict(facts.problems)
    if one.zombie:
        missing["arguments"] = f"process {one.pid} is a zombie: it has ended and its parent has not taken note of it"
    elif retitled:
        missing["arguments"] = "its title has overwritten its command line"
    elif one.unreadable:
        missing["arguments"] = f"process {one.pid} belongs to another user: run memledger as that user, or with sudo"
    same = proc.is_same(one.pid, one.created)
    return Process(
        pid=one.pid,
        parent_pid=one.parent,
        role=title.role,
        title=clean(one.title if retitled else one.comm),
        arguments=() if retitled else titles.shown_arguments(one.arguments),
        dp=title.dp,
        pp=title.pp,
        tp=title.tp,
        ep=title.ep,
        user=clean(facts.user) if facts.user else None,
        started_at=proc.moment(one.created),
        zombie=one.zombie,
        resident_bytes=facts.resident if same else None,
        namespace_pids=proc.namespace_pids(one.pid) if same else (),
        container=container,
        missing=missing,
    )


def _placed(
    tree: Tree,
    processes: tuple[Process, ...],
    devices: DeviceSample | None,
    environment: Mapping[str, str] | None,
    flags: Mapping[str, str | bool],
    container: str | None,
) -> tuple[Process, ...]:
    ranks = [p for p in processes if p.role in gpus.RANK_ROLES]
    seen = gpus.visible(devices, environment, in_container=container is not None)
    if "data_parallel_rank" in flags:
        seen = gpus.Visible(None, None, "with --data-parallel-rank each engine's GPUs are chosen outside the server")
    shape = gpus.layout(tree.framework, flags, ranks)
    if shape.tp == 1:
        processes = tuple(_first_of_one(p) for p in processes)
    return gpus.placed(processes, devices, shape, seen, foreign_pids=bool(proc.in_pid_namespace()))


def _first_of_one(one: Process) -> Process:
    """Titles leave out a rank of a parallel size of one: it is TP0."""
    is_rank = one.role in {"worker", "scheduler"} and one.tp is None
    return msgspec.structs.replace(one, tp=0) if is_rank else one


# ------------------------------------------------------------------------------------------------------------- its port


def _asked_port(flags: Mapping[str, str | bool]) -> int | None:
    value = flags.get("port")
    return int(value) if isinstance(value, str) and value.isdecimal() and 0 < int(value) < 65536 else None


def _address(
    tree: Tree,
    flags: Mapping[str, str | bool],
    container: str | None,
    missing: dict[str, str],
    notes: list[str],
) -> http.Address | None:
    """Where the server can be asked from here; None with the reason in `missing`."""
    if isinstance(flags.get("uds"), str):
        missing["port"] = "the server listens on a Unix socket (--uds), which memledger does not ask"
        return None
    asked = _asked_port(flags)
    shared = proc.shares_network(tree.root.pid)
    if shared is False or (shared is None and container is not None):
        name = f" (container {container[:12]})" if container else ""
        missing["endpoints"] = (
            f"the server's network is not ours{name}, so that its port {asked or DEFAULT_PORTS[tree.framework]} "
            "can't be asked from here: run memledger inside the container"
        )
        return None
    sockets, unreadable = _front_sockets(tree)
    chosen = _choose(tree.framework, asked, sockets)
    if chosen is None:
        return _unread_port(tree, asked, flags, unreadable, missing)
    host = _loopback(chosen.host)
    if host is None:
        missing["endpoints"] = (
            f"the server listens on {chosen.host} only, and memledger asks nothing but loopback: start it with --host 127.0.0.1 or 0.0.0.0"
        )
        return None
    if asked is not None and chosen.port != asked:
        notes.append(f"the server listens on port {chosen.port}, not on {asked} as its command line says")
    return http.Address(chosen.port, host, tls="ssl_certfile" in flags)


def _front_sockets(tree: Tree) -> tuple[list[proc.Listening], str | None]:
    found: list[proc.Listening] = []
    unreadable: str | None = None
    for one, title in tree.members:
        if title.role in _FRONT_ROLES and not one.zombie:
            sockets, why = proc.listening(one.pid)
            found += sockets
            unreadable = unreadable or why
    return found, unreadable


def _choose(framework: Framework, asked: int | None, sockets: Iterable[proc.Listening]) -> proc.Listening | None:
    """The HTTP socket: the command line's port, else the engine's default, else the lowest that was not handed out at random."""
    by_port: dict[int, proc.Listening] = {}
    for one in sorted(sockets, key=lambda s: (s.port, _loopback(s.host) is None, ":" in s.host)):
        by_port.setdefault(one.port, one)
    for port in (asked, DEFAULT_PORTS[framework]):
        if port in by_port:
            return by_port[port]
    if asked is None:
        fixed = [s for port, s in by_port.items() if port < _EPHEMERAL_FROM]
        if fixed:
            return fixed[0]
    return next(iter(by_port.values())) if len(by_port) == 1 else None


def _unread_port(
    tree: Tree, asked: int | None, flags: Mapping[str, str | bool], unreadable: str | None, missing: dict[str, str]
) -> http.Address | None:
    """The command line's port where the sockets can't be read: asked only if the server's own user listens there."""
    if unreadable is None:
        missing["port"] = "no process of the server listens on a port yet: it is still starting, or it serves no HTTP"
        return None
    port = asked or DEFAULT_PORTS[tree.framework]
    uid = proc.facts(tree.root.pid).uid
    if uid is None or proc.owner_of_port(port) != uid:
        missing["port"] = unreadable
        return None
    return http.Address(port, tls="ssl_certfile" in flags)


def _loopback(host: str) -> str | None:
    """The loopback address under which a socket bound to `host` answers; None where it has none."""
    if host in {"0.0.0.0", "::", ""}:
        return "127.0.0.1"
    mapped = host.removeprefix("::ffff:")
    return mapped if http.is_loopback(mapped) else None


# ------------------------------------------------------------------------------------------------------ what it answers


def _body(answers: Iterable[Endpoint], *paths: str) -> Any:
    return next((a.body for a in answers if a.path.partition("?")[0] in paths and a.body is not None), None)


def _usage(framework: Framework, answers: Sequence[Endpoint]) -> tuple[Metrics | None, dict[str, Metrics]]:
    series = _body(answers, "/metrics")
    info = _body(answers, "/server_info", "/get_server_info")
    return metrics.read(framework, series if isinstance(series, list) else [], info, _body(answers, "/v1/loads"))


def _why_no_usage(answers: Sequence[Endpoint]) -> str:
    page = next((a for a in answers if a.path == "/metrics"), None)
    if page is None or page.problem is None:
        return "the server's metrics hold no figures of its pools"
    return page.problem


def _model(tree: Tree, answers: Sequence[Endpoint]) -> str | None:
    info = _body(answers, "/server_info", "/get_server_info")
    if isinstance(info, dict) and isinstance(info.get("model_path"), str):
        return str(info["model_path"])
    if named := titles.served_model(tree.framework, tree.root.arguments):
        return named
    models = _body(answers, "/v1/models")
    rows = models.get("data") if isinstance(models, dict) else None
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and isinstance(name := row.get("root") or row.get("id"), str):
            return name
    return None


def _version(tree: Tree, answers: Sequence[Endpoint]) -> str | None:
    """The engine's own answer, else the installed package beside the interpreter that runs it."""
    for path in ("/version", "/server_info", "/get_server_info"):
        body = _body(answers, path)
        if isinstance(body, dict) and isinstance(version := body.get("version"), str):
            return version
    return _installed_version(tree)


def _installed_version(tree: Tree) -> str | None:
    first = tree.root.arguments[0] if tree.root.arguments else ""
    if not first.startswith("/"):
        return None
    prefix = (proc.PROC / str(tree.root.pid) / "root") / Path(first).parent.parent.relative_to("/")
    names = ("vllm", "vllm_*") if tree.framework == "vllm" else ("sglang",)
    try:
        found = [p for name in names for p in prefix.glob(f"lib/python3*/site-packages/{name}-[0-9]*.dist-info")]
    except OSError:
        return None
    return clean(found[0].name.removesuffix(".dist-info").partition("-")[2]) if len(found) == 1 else None
