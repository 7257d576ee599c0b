"""Generated structured text: the same records in two formats, tool calls with their results, tables, settings, logs."""

import json
import random
from collections.abc import Callable
from typing import Any

from kdlab.mini import words
from kdlab.mini.records import MAKERS, Record, make_records


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return " ".join(value) if isinstance(value, list) else str(value)


def _json_lines(kind: str, rows: list[Record]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def _json_pretty(kind: str, rows: list[Record]) -> str:
    return json.dumps({kind: rows}, indent=2)


def _csv(kind: str, rows: list[Record]) -> str:
    return "\n".join([",".join(rows[0]), *(",".join(map(_plain, row.values())) for row in rows)])


def _markdown(kind: str, rows: list[Record]) -> str:
    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])]
    lines += [" | ".join(map(_plain, row.values())) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _yaml(kind: str, rows: list[Record]) -> str:
    lines = [f"{kind}:"]
    for row in rows:
        pairs = [f"{key}: {_plain(value)}" for key, value in row.items()]
        lines += [f"  - {pairs[0]}", *(f"    {pair}" for pair in pairs[1:])]
    return "\n".join(lines)


def _sql(kind: str, rows: list[Record]) -> str:
    def literal(value: Any) -> str:
        if isinstance(value, int | float):
            return _plain(value)
        return "'" + _plain(value) + "'"

    columns = ", ".join(rows[0])
    return "\n".join(
        f"INSERT INTO {kind} ({columns}) VALUES ({', '.join(map(literal, row.values()))});" for row in rows
    )


def _xml(kind: str, rows: list[Record]) -> str:
    def element(row: Record) -> str:
        inner = "".join(f"<{key}>{_plain(value)}</{key}>" for key, value in row.items())
        return f"  <{kind[:-1]}>{inner}</{kind[:-1]}>"

    return "\n".join([f"<{kind}>", *map(element, rows), f"</{kind}>"])


_FORMATS: dict[str, Callable[[str, list[Record]], str]] = {
    "JSON": _json_pretty, "JSON lines": _json_lines, "CSV": _csv, "Markdown": _markdown, "YAML": _yaml, "SQL": _sql,
    "XML": _xml,
}  # fmt: skip


def _conversion(r: random.Random) -> str:
    kind, rows = make_records(r, r.randint(2, 5))
    source, result = r.sample(sorted(_FORMATS), 2)
    head = f"Convert these {len(rows)} {kind} from {source} to {result}."
    return f"{head}\n\n{source}:\n{_FORMATS[source](kind, rows)}\n\n{result}:\n{_FORMATS[result](kind, rows)}\n"


def _listing(r: random.Random) -> str:
    kind, rows = make_records(r, r.randint(3, 6))
    name = r.choice(sorted(_FORMATS))
    return f"{len(rows)} {kind} as {name}:\n{_FORMATS[name](kind, rows)}\n"


def _tool_calls(r: random.Random) -> str:
    """Return a session: questions, the calls, their results, and the answers, each repeating the last one's facts."""
    parts = [f"Tools: {', '.join(f'get_{name[:-1]}' for name in sorted(MAKERS))}"]
    for index in range(r.randint(1, 3)):
        kind = r.choice(sorted(MAKERS))
        row = MAKERS[kind](r, r.randint(1, 400))
        noun, (key, *others) = kind[:-1], row
        asked = r.sample(others, 2)
        wanted = f"{asked[0].replace('_', ' ')} and the {asked[1].replace('_', ' ')}"
        call = json.dumps({key: row[key], "fields": asked})
        result = json.dumps({key: row[key]} | {field: row[field] for field in asked})
        facts = " and ".join(f"the {field.replace('_', ' ')} is {_plain(row[field])}" for field in asked)
        parts += [
            f"User: What is the {wanted} of {noun} {row[key]}?",
            f"Call functions.get_{noun}:{index} {call}",
            f"Return of functions.get_{noun}:{index}\n{result}",
            f"Assistant: For {noun} {row[key]}, {facts}.",
        ]
    return "\n".join(parts) + "\n"


def _settings(r: random.Random) -> str:
    team, other = r.sample(words.TEAMS, 2)
    port, size = r.choice([8000, 8080, 9000, 9090]), r.choice([10, 20, 25, 50, 100])
    values: dict[str, Any] = {
        "name": team,
        "owner": f"{r.choice(words.PEOPLE).lower()}@{team}.example.com",
        "server": {"host": f"{team}.internal.example.com", "port": port, "workers": r.randint(1, 16)},
        "database": {"url": f"postgres://{team}@db-{r.randint(1, 9)}:5432/{team}", "pool_size": size},
        "cache": {"enabled": r.random() < 0.5, "ttl_seconds": r.choice([30, 60, 300, 600, 3600])},
        "depends_on": [f"{other}-api", f"{r.choice(words.TEAMS)}-worker"],
        "features": {tag: r.random() < 0.5 for tag in r.sample(words.TAGS, r.randint(2, 4))},
    }
    kept = {key: value for key, value in values.items() if key == "name" or r.random() < 0.75}
    environment = [f"{team.upper()}_PORT={port}", f"{team.upper()}_HOST={team}.internal.example.com"]
    lines = "\n".join(r.sample(environment, r.randint(0, 2)))
    head = f"Settings of the {team} service:\n{json.dumps(kept, indent=r.choice([2, 4]))}\n"
    return head + (f"\nEnvironment:\n{lines}\n" if lines else "")


def _log(r: random.Random) -> str:
    team, person = r.choice(words.TEAMS), r.choice(words.PEOPLE).lower()
    hour, minute, second = r.randint(0, 23), r.randint(0, 40), r.randint(0, 30)
    lines = []
    for _ in range(r.randint(4, 8)):
        second += r.randint(1, 20)
        stamp = f"2024-{r.randint(3, 3):02d}-17T{hour:02d}:{minute + second // 60:02d}:{second % 60:02d}Z"
        request = r.randint(1000, 9999)
        path = f"/{r.choice(words.TEAMS)}/{r.choice(sorted(MAKERS))}/{r.randint(1, 400)}"
        status = r.choice([200, 200, 200, 201, 204, 404, 500])
        level = "ERROR" if status == 500 else "WARNING" if status == 404 else "INFO"
        lines.append(
            f"{stamp} {level} {team} request={request} user={person} {r.choice(words.METHODS)} {path} "
            f"status={status} duration_ms={r.randint(1, 900)}"
        )
    return "\n".join(lines) + "\n"


_MAKERS: tuple[tuple[Callable[[random.Random], str], int], ...] = (
    (_conversion, 4), (_tool_calls, 4), (_listing, 2), (_settings, 1), (_log, 1),
)  # fmt: skip


def structured_document(rng: random.Random) -> str:
    """Return one document: a conversion, a session with tool calls, a listing, settings or a log."""
    makers, weights = zip(*_MAKERS, strict=True)
    return rng.choices(makers, weights)[0](rng)
