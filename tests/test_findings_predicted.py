"""A remedy's effects by SGLang's own sizing."""

import json

from click.testing import CliRunner
from finding_helpers import sglang, worker

from memledger.cli.demo import command
from memledger.findings import predicted
from memledger.ledger import Capacity
from memledger.units import GIB

ROWS = {"rows": 125, "slots": 124}
DETAILS = {"recurrent_state/conv": ROWS, "recurrent_state/ssm": ROWS}


def server(**config):
    rank = worker(
        78,
        details=DETAILS,
        recurrent_state__conv=0.34,
        recurrent_state__ssm=17.58,
        kv_cache__k=10.08,
        kv_cache__v=10.08,
        capacity=Capacity(kv_tokens=330_323, state_slots=124, max_running_requests=24, slots_per_request=5),
    )
    return sglang(rank, version="0.5.18", page_size=1, tp_size=1, memory_fraction=0.85, **config)


def test_fewer_slots_move_every_account_and_capacity():
    case = server(context_length=262_144)
    effects, basis = predicted.effects(case, case.ranks[0], {"state_slots": 20})
    by_name = {e.account or e.capacity: e.bytes if e.account else e.change for e in effects}
    assert abs(by_name["recurrent_state"] + 14.9 * GIB) < 0.05 * GIB
    assert abs(by_name["kv_cache"] - 14.9 * GIB) < 0.05 * GIB
    assert abs(330_323 + by_name["kv_tokens"] - 574_619) < 200
    assert by_name["state_slots"] == -104
    assert by_name["max_running_requests"] == -20
    # 20 rows of the table of requests and tokens.
    assert by_name["request_tables"] == -20 * (262_144 + 4) * 4
    assert basis.startswith("derived: SGLang's own sizing (0.5.18)")


def test_what_the_sizing_refuses_gives_nothing():
    case = server(unified_pool=True)
    assert predicted.effects(case, case.ranks[0], {"state_slots": 20}) is None


def test_the_demo_predicts_its_remedy():
    report = json.loads(CliRunner().invoke(command, ["--format", "json", "--no-live"]).stdout)
    (finding,) = (f for f in report["servers"][0]["findings"] if f["code"] == "ML101")
    (remedy,) = finding["remedies"]
    assert {e.get("account") or e["capacity"] for e in remedy["effects"]} >= {
        "recurrent_state",
        "kv_cache",
        "kv_tokens",
        "max_running_requests",
    }
