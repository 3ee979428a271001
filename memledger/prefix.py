"""What stands before a message: peeling containers, journals, colours and engine prefixes off a line.

A literal counts only where a message can really start: at the start of the line, after known prefixes, or where a whole
engine prefix stands inside a line that is no record itself (glued to a progress bar, flattened by copying). Text
further in (a user's prompt that the server logs) is never taken for a line of the server.

What cannot be told: a prompt with real line ends that a server prints raw, without quoting it and without any mark
before or after, looks exactly like the server's own lines.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from memledger import __version__
from memledger.cache import cached, key_of
from memledger.events import Prefix
from memledger.grammar import PREFIX_FILE, GrammarError, parsers_folder
from memledger.sanitize import strip_terminal

Layer = Literal["wrapper", "engine", "custom", "field"]

MOST_LAYERS: Final = 16
MOST_DIGITS: Final = 12
"""Of a rank or a pid; a longer number is neither."""

MOST_RECORDS: Final = 1000
"""No line carries more records than this; what follows is not read."""

_RANK: Final = re.compile(r"([A-Za-z_]+?)[ _=\[-]?(\d+)")
_WORKER: Final = re.compile(r"(?:VllmWorker|Worker)(?:[ _](?P<parts>.+)|-(?P<rank>\d+))$")
_ENGINE_CORE: Final = re.compile(r"(?:EngineCore_(?:DP)?|APIServer_DPRank_)(\d+)$")
_REPEATED: Final = r"(?s) ?\[repeated (\d+)x across cluster\].*$"
_BOX_END: Final = r"[ \t]*[│┃║][ \t]*$"

# Patterns that few lines need are compiled on first use (`_compiled`).
# A whole engine prefix. Inside a line only these start a record: nothing shorter is told from a user's text.
_WHOLE_PREFIX: Final = re.compile(
    r"""(?<!['"=(,])(?:
      \[\d{4}-\d\d-\d\d[ ]\d\d:\d\d:\d\d(?:[.,]\d{3})?(?:[ ][A-Z][A-Z_]*\d+){0,8}\][ ]?
    | \[\d\d:\d\d:\d\d(?:[ ][A-Z][A-Z_]*\d+){1,8}\][ ]
    | (?:\([A-Za-z][\w :=-]{0,60}?[ ]pid=\d+(?:,[ ]ip=[\w.:-]+)?\)[ ]){0,2}
      (?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[ ]\d\d-\d\d[ ]\d\d:\d\d:\d\d[ ]\[?[\w./-]+\.py:\d+\][ ]
    )""",
    re.VERBOSE,
)
_BAR_END: Final = r"(?:\d+%\|[^|\n]{0,200}\|[^\n]{0,100}|(?:it|s|B|tok\w*|ex\w*|req\w*|shard\w*)/(?:s|it|B)[^\]\n]{0,80}\]|\d\d:\d\d<[^\]\n]{0,60}\]|\.{2,})\s*$"

# Lines whose text is the user's, not the server's.
_REQUEST: Final = r"""(?x)
      Received[ ]request\b | Receive:[ ] | Finish:[ ] | Added?ing[ ]request\b | Added[ ]request\b | Generated[ ]response\b
    | (?:Batch)?(?:Tokenized)?(?:Generate|Embedding)ReqInput\( | Request[ ](?:body|payload|received)\b
    | [^'"\n]{0,200}["'](?:GET|POST|PUT|HEAD|OPTIONS|DELETE|PATCH)[ ]/
    """
_USER_TEXT: Final = r"""(?xi)
      \bprompts?\\?["']?\s*[:=] | \\?["'](?:content|messages|text|input|inputs|query|role|arguments)\\?["']\s*: | \b(?:text|content|input_ids|query|inputs)=
    | ReqInput\( | Received[ ]request | Receive:[ ]obj | \b(?:GET|POST|PUT)[ ]/ | curl[ ] | [?&]\w+=
    """
_CRI: Final = re.compile(rb"\d{4}-\d\d-\d\dT\S{8,40} (stdout|stderr) ([PF]) ")
_DOCKER_FRAGMENT: Final = 16 * 2**10
_TEXT_KEYS: Final = ("message", "msg", "log", "MESSAGE", "event")
_TIME_KEYS: Final = ("asctime", "time", "timestamp", "ts", "@timestamp", "datetime", "__REALTIME_TIMESTAMP")
_LEVEL_KEYS: Final = ("levelname", "level", "severity", "lvl", "loglevel", "PRIORITY")
_EXCERPT: Final = r"""(?s)\s*(?:"(?:body|logs?|output|stdout|stderr|description|excerpt|line|lines|snippet|error|traceback)"\s*:\s*\[?\s*)?(?P<text>"(?:[^"\\]|\\.)*"?)\s*[\],}]*\s*$"""


class PrefixSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line, the groups its prefix must give, and the message that must be left after all layers."""

    line: str
    expect: dict[str, str]
    rest: str


class PrefixRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prefix style."""

    id: str
    layer: Layer
    pattern: str
    means: str
    style: str = ""
    starts: str = ""
    sample: tuple[PrefixSample, ...] = ()


class Record(NamedTuple):
    """One record of a line: its prefix, its message, and the text of the record (prefix and message)."""

    prefix: Prefix
    message: str
    text: str


@functools.lru_cache(maxsize=1)
def prefix_rules() -> tuple[PrefixRule, ...]:
    """The prefix styles of `parsers/prefixes.toml`."""
    path = parsers_folder() / PREFIX_FILE
    text = path.read_bytes()
    kept = cached("prefixes", key_of(__version__, text), lambda: msgspec.msgpack.encode(_read_prefixes(path, text)))
    try:
        return msgspec.msgpack.decode(kept, type=tuple[PrefixRule, ...])
    except msgspec.DecodeError:
        return _read_prefixes(path, text)


def _read_prefixes(path: Path, text: bytes) -> tuple[PrefixRule, ...]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tuple(msgspec.convert(tomllib.loads(text.decode())["prefix"], list[PrefixRule]))
    except (KeyError, ValueError, msgspec.ValidationError) as error:
        raise GrammarError(f"{path}: {error}") from error


@functools.lru_cache(maxsize=1)
def _layers() -> dict[str, list[PrefixRule]]:
    found: dict[str, list[PrefixRule]] = {"wrapper": [], "engine": [], "custom": [], "field": []}
    for rule in prefix_rules():
        found[rule.layer].append(rule)
    return found


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Compiled on first use: a log meets few of the styles."""
    return re.compile(pattern, flags)


def _first_of(
    groups: tuple[list[PrefixRule], ...], text: str, position: int
) -> tuple[PrefixRule, re.Match[str]] | None:
    """The first rule of the groups that takes something off `text` at `position`."""
    first = text[position : position + 1]
    for group in groups:
        for rule in group:
            if rule.starts and first not in rule.starts:
                continue
            found = _compiled(rule.pattern).match(text, position)
            if found is not None and found.end() > position:
                return rule, found
    return None


class _Peeled:
    """What has been taken off so far, layer by layer."""

    def __init__(self) -> None:
        self.taken: list[tuple[PrefixRule, dict[str, str]]] = []
        self.json: dict[str, Any] = {}
        self.style: str | None = None
        self.repeated: int | None = None

    def copy_without_engine(self) -> _Peeled:
        other = _Peeled()
        other.taken = [t for t in self.taken if t[0].layer == "wrapper" or t[0].id == "process"]
        other.json = self.json
        return other

    def has(self, *layers: str) -> bool:
        return any(rule.layer in layers for rule, _ in self.taken)

    def prefix(self) -> Prefix:
        if not self.taken and not self.json and self.repeated is None:
            return Prefix()
        found: dict[str, str] = {}
        sources: list[str] = []
        for rule, groups in self.taken:
            found.update({k: v for k, v in groups.items() if k not in {"source", "source_only", "task"}})
            if source := groups.get("source") or groups.get("source_only"):
                sources.append(f"{groups['host']}/{source}" if "host" in groups and rule.layer == "wrapper" else source)
            elif task := groups.get("task"):
                sources.append(f"task {task.strip()}")
        return _prefix(found, sources, self.json, self.style, self.repeated)


def peel(line: str) -> tuple[Prefix, str]:
    """The prefix of a line and the message after it. Escapes are taken off; no prefix gives an empty `Prefix`.

    Of a line that holds several records it is the first that has a prefix.
    """
    found = records(line)
    first = next((r for r in found if r.prefix != Prefix()), found[0])
    return first.prefix, first.message


def records(line: str) -> list[Record]:
    """Every record of one line (without carriage returns), in order; a line without any prefix is one record.

    Most lines are one record. More come from a record glued to the end of a progress bar, from logs flattened to one
    line by copying, and from line ends inside a JSON string.
    """
    text = strip_terminal(line).lstrip("\ufeff")
    found: list[Record] = []
    for peeled, position, piece in _unwrap(text, _Peeled(), 0):
        found.extend(_split(peeled, position, piece))
        if len(found) > MOST_RECORDS:
            break
    return found or [Record(Prefix(), text, text)]


def wrapper_of(piece: str) -> Prefix:
    """The prefix of a line's text before its first carriage return, which may hold nothing but that or a bar's blanks."""
    return records(" ".join(f"{piece[:400]} .".split()))[0].prefix


def under_wrapper(record: Record, outer: Prefix) -> Record:
    """The record with the stream and the time of the physical line it stands in.

    A container or a journal prefixes a physical line once; what carriage returns start anew inside it (progress bars
    and the record glued to the last one) came from the same stream.
    """
    prefix = record.prefix
    if prefix.source is not None or prefix.wrapper_time is not None:
        return record
    if outer.source is None and outer.wrapper_time is None:
        return record
    inherited = msgspec.structs.replace(
        prefix, source=outer.source, wrapper_time=outer.wrapper_time, host=prefix.host or outer.host
    )
    return record._replace(prefix=inherited)


def is_users_text(message: str) -> bool:
    """Whether a message shows a request: what follows in it was written by a user, not by the server."""
    return _compiled(_REQUEST).match(message) is not None


def is_fragment(line: bytes) -> bool:
    """Whether a container's log driver split a record here: the next line of the same stream goes on with it."""
    return _fragment(line)[1]


def joined_fragments(before: bytes, line: bytes, following: Sequence[bytes]) -> tuple[str | None, bool]:
    """The text of a line, with the fragments that follow it; None for a later fragment, which starts no record.

    The second value says whether the line was whole by itself.
    """
    stream, partial, text = _fragment(line)
    if stream is None:
        return line.decode("utf-8", "replace"), True
    earlier, unfinished, _ = _fragment(before)
    if unfinished and earlier == stream:
        return None, False
    if not partial:
        return line.decode("utf-8", "replace"), True
    for other in following:
        further, partial, rest = _fragment(other)
        if further != stream:
            continue
        text += rest
        if not partial:
            break
    return text, False


def _fragment(line: bytes) -> tuple[str | None, bool, str]:
    """(stream, whether it goes on in the next line, text) of a CRI line or a line of Docker's JSON file."""
    if (cri := _CRI.match(line)) is not None:
        return cri.group(1).decode(), cri.group(2) == b"P", line[cri.end() :].decode("utf-8", "replace")
    if line.startswith(b'{"log":"'):
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None, False, ""
        text = value.get("log") if isinstance(value, dict) else None
        if isinstance(text, str):
            # Docker splits at 16 KiB; only a fragment that long without a line end goes on.
            return str(value.get("stream")), len(text.encode()) >= _DOCKER_FRAGMENT and not text.endswith("\n"), text
    return None, False, ""


def _unwrap(text: str, peeled: _Peeled, depth: int) -> Iterator[tuple[_Peeled, int, str]]:
    """Take all layers off `text`; a JSON layer may hold several lines."""
    position = _take_layers(text, 0, peeled)
    body = text[position:]
    if depth < 4 and (inner := _inside_json(body, peeled)) is not None:
        lines = [piece for part in inner.split("\n") for piece in part.split("\r") if piece.strip()]
        for number, piece in enumerate(lines[:MOST_RECORDS]):
            base = _Peeled()
            base.taken, base.json, base.style = list(peeled.taken), peeled.json, peeled.style
            yield from _unwrap(piece, base, depth + 1)
            # The rest of a request that was logged is the user's text, however it looks.
            if number == 0 and len(lines) > 1 and is_users_text(text_after_prefix(piece)):
                return
        return
    yield peeled, position, text


def text_after_prefix(text: str) -> str:
    """The message of a line that is one record."""
    return text[_take_layers(text, 0, _Peeled()) :]


def start_style(text: str) -> str | None:
    """What kind of prefix a line starts with (the id of its style; of one that is indented or quoted, of both)."""
    text = strip_terminal(text).lstrip("\ufeff")
    layers = _layers()
    found: list[str] = []
    position = 0
    while len(found) < 2:
        if text.startswith('{"', position):
            found.append("json")
            break
        hit = _first_of((layers["engine"], layers["wrapper"], layers["custom"]), text, position)
        if hit is None:
            break
        found.append(hit[0].id)
        position = hit[1].end()
        if hit[0].id not in {"indented", "markdown", "numbered", "box"}:
            break
    return "+".join(found) or None


def _take_layers(text: str, position: int, peeled: _Peeled) -> int:
    layers = _layers()
    engines = 0
    for _ in range(MOST_LAYERS):
        groups: tuple[list[PrefixRule], ...]
        if engines:
            groups = (layers["engine"], layers["custom"] + layers["field"])
        elif peeled.has("custom"):
            groups = (layers["engine"], layers["field"])
        else:
            groups = (layers["engine"], layers["wrapper"], layers["custom"])
        hit = _first_of(groups, text, position)
        if hit is None:
            break
        rule, found = hit
        if rule.layer == "engine":
            engines += 1
            peeled.style = rule.style or peeled.style
        if engines and rule.layer in {"custom", "field"} and peeled.style == "vllm":
            break  # a vLLM record is complete: what follows is the message
        peeled.taken.append((rule, {k: v for k, v in found.groupdict().items() if v is not None}))
        position = found.end()
    return position


def _split(peeled: _Peeled, position: int, text: str) -> Iterator[Record]:
    message = text[position:]
    for start, end, piece_peeled in _pieces(peeled, message):
        piece = message[start:end]
        if start == 0:
            yield _record(peeled, piece, text[: position + end])
        else:
            inner = _take_layers(piece, 0, piece_peeled)
            yield _record(piece_peeled, piece[inner:], piece)


def _record(peeled: _Peeled, message: str, text: str) -> Record:
    message = message.strip(" \t\r\n")
    if "[repeated " in message and (again := _compiled(_REPEATED).search(message)):
        peeled.repeated = _whole(again.group(1))
        message = message[: again.start()]
    if peeled.taken and message.endswith(("│", "┃", "║")):
        message = _compiled(_BOX_END).sub("", message)
    return Record(peeled.prefix(), message, text)


def _pieces(peeled: _Peeled, message: str) -> list[tuple[int, int, _Peeled]]:
    """Where records start inside a message: (start, end, prefix so far)."""
    whole = [(0, len(message), peeled)]
    starts = [] if message.startswith(("{", "[{")) else [m.start() for m in _starts(message)]
    if not starts:
        return whole
    lead = message[: starts[0]]
    if _is_record(peeled):
        # A record of its own: only a progress bar ends without a line end (and never quotes anything).
        if "'" in lead or '"' in lead or not _compiled(_BAR_END).search(lead[-400:]):
            return whole
        starts = starts[:1]
    elif _compiled(_USER_TEXT).search(lead):
        return whole
    bounds = [0, *[s for s in starts if s], len(message)]
    return [(a, b, peeled if a == 0 else peeled.copy_without_engine()) for a, b in itertools.pairwise(bounds) if b > a]


def _starts(message: str) -> Iterator[re.Match[str]]:
    for match in itertools.islice(_WHOLE_PREFIX.finditer(message), MOST_RECORDS):
        yield match
        # A record that shows a request ends what can be told: the rest may be its text.
        if is_users_text(message[match.end() : match.end() + 400]):
            return


def _is_record(peeled: _Peeled) -> bool:
    # A container's runtime wraps what was printed line by line: inside stands a plain line.
    return (bool(peeled.json) and "stream" not in peeled.json) or peeled.has("engine", "custom")


def _inside_json(body: str, peeled: _Peeled) -> str | None:
    """The log text inside a JSON layer: a record as an object, or an excerpt quoted as a string."""
    if body.startswith("{"):
        return _json_record(body, peeled)
    if body.startswith('"') or (body[:1] == " " and '"' in body[:200]):
        return _json_string(body) if not peeled.has("engine", "custom") else None
    return None


def _json_record(body: str, peeled: _Peeled) -> str | None:
    try:
        value = msgspec.json.decode(body.strip())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    key = next((k for k in _TEXT_KEYS if k in value), None)
    text = value.get(key) if key else None
    if key == "MESSAGE" and isinstance(text, list):
        text = bytes(n for n in text if isinstance(n, int) and 0 <= n < 256).decode("utf-8", "replace")
    companions = ("stream", *_TIME_KEYS, *_LEVEL_KEYS, "_PID", "_SYSTEMD_UNIT", "SYSLOG_IDENTIFIER")
    if not isinstance(text, str) or not any(k in value for k in companions):
        return None
    # Objects inside objects: an outer layer's own keys stay unless the inner ones say more.
    peeled.json = {
        **peeled.json,
        **{k: v for k, v in value.items() if isinstance(v, (str, int, dict))},
        "_text_key": key,
    }
    name = value.get("name") or value.get("logger")
    if isinstance(name, str):
        peeled.style = next((e for e in ("sglang", "vllm") if name.split(".")[0] == e), peeled.style)
    return strip_terminal(text)


def _json_string(body: str) -> str | None:
    quoted = _compiled(_EXCERPT).match(body)
    if quoted is None:
        return None
    text = quoted.group("text")
    try:
        value = msgspec.json.decode(text if text.endswith('"') and len(text) > 1 else text + '"')
    except msgspec.DecodeError:
        return None
    return strip_terminal(value) if isinstance(value, str) and value.strip() else None


def _prefix(
    found: dict[str, str], sources: list[str], data: dict[str, Any], style: str | None, repeated: int | None
) -> Prefix:
    process = found.get("process") or _text(data, "processName") or None
    ranks = _ranks(found.get("ranks", ""))
    if (rank := _whole(found.get("local_rank"))) is not None:
        ranks["rank"] = rank
    if process:
        ranks.update(_process_ranks(process))
    pid = _whole(found.get("pid") or found.get("pid_in_brackets"))
    return Prefix(
        time=_iso(found.get("time")) or _json_time(data),
        wrapper_time=found.get("wrapper_time") or _wrapper_time(data),
        ranks=ranks,
        pid=pid if pid is not None else _number(data, "process", "pid"),
        process=process,
        host=found.get("host") or _text(data, "_HOSTNAME", "host", "hostname"),
        level=found.get("level") or _text(data, "levelname", "level", "severity"),
        file=found.get("file") or _text(data, "filename"),
        source="/".join((*_json_sources(data), *sources)) or None,
        style=style,
        repeated=repeated,
    )


def _whole(digits: str | None) -> int | None:
    """The number; None where there is none, or it is longer than any rank or pid."""
    return int(digits) if digits is not None and len(digits) <= MOST_DIGITS else None


def _ranks(text: str) -> dict[str, int]:
    ranks = {name.strip("_").lower(): int(n) for name, n in _RANK.findall(text) if len(n) <= MOST_DIGITS}
    if "gpu_id" in ranks:
        ranks["gpu"] = ranks.pop("gpu_id")
    return ranks


def _process_ranks(process: str) -> dict[str, int]:
    if worker := _WORKER.match(process):
        return _ranks(worker.group("parts")) if worker.group("parts") else _ranks(f"rank {worker.group('rank')}")
    engine = _ENGINE_CORE.match(process)
    return _ranks(f"dp {engine.group(1)}") if engine else {}


def _text(data: dict[str, Any], *keys: str) -> str | None:
    return next((v for k in keys if isinstance(v := data.get(k), str) and v), None)


def _number(data: dict[str, Any], *keys: str) -> int | None:
    return next((v for k in keys if isinstance(v := data.get(k), int) and not isinstance(v, bool)), None)


def _json_time(data: dict[str, Any]) -> str | None:
    """The engine's own time in a JSON record; Docker's and journald's are the wrapper's."""
    return _iso(
        _text(data, "asctime", "timestamp", "ts", "@timestamp", "datetime")
        or (None if "stream" in data else _text(data, "time"))
    )


def _wrapper_time(data: dict[str, Any]) -> str | None:
    stamp = data.get("__REALTIME_TIMESTAMP")
    if isinstance(stamp, (str, int)) and str(stamp).isdecimal() and len(str(stamp)) < 18:
        return datetime.fromtimestamp(int(stamp) / 1e6, timezone.utc).isoformat(timespec="milliseconds")
    return _text(data, "time") if "stream" in data else None


def _json_sources(data: dict[str, Any]) -> list[str]:
    """What tells streams apart in JSON: a journal's host and unit, a pod and container."""
    unit = _text(data, "_SYSTEMD_UNIT", "_SYSTEMD_USER_UNIT", "CONTAINER_NAME", "SYSLOG_IDENTIFIER")
    found = [name for name in (_text(data, "_HOSTNAME") if unit else None, unit) if name]
    pod = data.get("kubernetes")
    if isinstance(pod, dict):
        found += [str(pod[k]) for k in ("pod_name", "container_name") if isinstance(pod.get(k), str)]
    attributes = data.get("attrs")
    if isinstance(attributes, dict) and isinstance(attributes.get("tag"), str):
        found.append(attributes["tag"])
    return found


def _iso(time: str | None) -> str | None:
    """ISO text; a missing year stays missing (`--11-02T10:12:56`)."""
    if time is None:
        return None
    if re.match(r"\d{4}[-/]", time):
        return time[:10].replace("/", "-") + time[10:].replace(" ", "T", 1).replace(",", ".")
    return "--" + time.replace(" ", "T", 1) if re.match(r"\d\d-\d\d ", time) else time


def check_samples() -> list[str]:
    """What is wrong with the prefix samples (empty: all are read as they say)."""
    problems = []
    for rule in prefix_rules():
        if not rule.sample:
            problems.append(f"prefix {rule.id}: no sample")
        for sample in rule.sample:
            _, rest = peel(sample.line)
            peeled = _Peeled()
            _take_layers(strip_terminal(sample.line), 0, peeled)
            taken = [groups for other, groups in peeled.taken if other.id == rule.id]
            if rest != sample.rest or sample.expect not in taken:
                shown = [(other.id, groups) for other, groups in peeled.taken]
                problems.append(f"prefix {rule.id}: {sample.line!r}: got {shown} and {rest!r}")
    return problems
