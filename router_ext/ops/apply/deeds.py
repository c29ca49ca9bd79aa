"""Steps as requests, and their answers; many steps by one request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from router_ext.ops.apply.kinds import AFTER_INVITATION, KINDS, MEMBERS, Kind, is_invitation, is_live
from router_ext.ops.apply.plan import Deed, Step
from router_ext.ops.rest import Refused, Rest, refusal

TOGETHER = 200
"""Operations by one request: the control plane takes about a second for them, and holds its locks as long."""
Operation = Mapping[str, Any]


async def all_of(rest: Rest, kind: Kind) -> list[dict[str, Any]]:
    """Every object of a kind that is live, the oldest first."""
    paths = (kind.path, "members") if kind is MEMBERS else (kind.path,)
    now = datetime.now(UTC)
    rows = [row for path in paths for row in await rest.all_of(f"/{path}")]
    return [row for row in rows if is_live(row, now)]


async def everything(rest: Rest, wanted: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    return {kind.name: await all_of(rest, kind) for kind in KINDS if kind.name in wanted}


def operations(step: Step) -> list[Operation]:
    """What is sent for a step, with the version that was read. A create sent twice is refused: its name is taken."""
    kind, row = step.kind, step.found
    match step.deed:
        case Deed.KEEP:
            return []
        case Deed.CREATE:
            return [_creation(kind, step.change)]
        case Deed.UPDATE:
            assert row is not None
            if is_invitation(row):  # the last invitation of an email counts
                return [_creation(kind, {**kind.stated(row), "managed_by": row["managed_by"], **step.change})]
            return [{"method": "PATCH", "path": _path(kind, row), "body": step.change, **_if_match(row)}]
        case Deed.DELETE:
            assert row is not None
            if kind.secret and "revoked_at" in row:  # keys and invitations
                return [{"method": "POST", "path": f"{_path(kind, row)}/revoke", **_if_match(row)}]
            if row.get("state") == "active":
                suspend = {"body": {"reason": "it is to be deleted"}, **_if_match(row)}
                row = {**row, "version": row["version"] + 1}
                return [
                    {"method": "POST", "path": f"{_path(kind, row)}/suspend", **suspend},
                    {"method": "DELETE", "path": _path(kind, row), **_if_match(row)},
                ]
            return [{"method": "DELETE", "path": _path(kind, row), **_if_match(row)}]


def _creation(kind: Kind, fields: Mapping[str, Any]) -> Operation:
    left_out = AFTER_INVITATION if kind is MEMBERS else ()
    body = {name: value for name, value in fields.items() if name not in left_out}
    return {"method": "POST", "path": f"/{kind.path}", "body": body}


def _path(kind: Kind, row: Mapping[str, Any]) -> str:
    path = "members" if kind is MEMBERS and not is_invitation(row) else kind.path
    return f"/{path}/{row['id']}"


def _if_match(row: Mapping[str, Any]) -> dict[str, str]:
    return {"if_match": f'"{row["version"]}"'} if "version" in row else {}


def portions(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Steps in their order, as many together as one request takes."""
    portion: list[Step] = []
    n = 0
    for step in steps:
        needed = len(operations(step))
        if portion and n + needed > TOGETHER:
            yield portion
            portion, n = [], 0
        portion.append(step)
        n += needed
    if portion:
        yield portion


async def do(rest: Rest, steps: Sequence[Step]) -> list[Refused | dict[str, Any]]:
    """What became of each of a portion of steps: its refusal, or the object of its last answer.

    Where the configuration as a whole was refused nothing was done, and each is tried by itself.

    Raises:
        SettingsError: nobody answers; what of this portion was done is unknown.
    """
    asked = [operations(step) for step in steps]
    flat = [operation for each in asked for operation in each]
    try:
        answers = iter(await rest.batch(flat) if flat else [])
    except Refused as refused:
        if len(steps) == 1 or refused.code != "config_refused":
            return [refused for _ in steps]
        return [(await do(rest, [step]))[0] for step in steps]
    outcomes: list[Refused | dict[str, Any]] = []
    for each in asked:
        outcome: Refused | dict[str, Any] = {}
        for answer in [next(answers) for _ in each]:
            if isinstance(outcome, Refused):
                continue  # what follows upon a refusal is refused for that
            status, body = int(answer["status"]), answer["body"] or {}
            outcome = refusal(status, body) if status >= 400 else body
        outcomes.append(outcome)
    return outcomes
