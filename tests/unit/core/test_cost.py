"""Charges of single requests: estimates settled, cached prompts, several sequences, marks that hold."""

from __future__ import annotations

import pytest

from router_ext.core.config import COST_MODELS, TenantConfig, TierConfig
from router_ext.core.cost import CostModel, LinearCost, build_cost
from router_ext.core.ids import TenantId, TierName
from router_ext.core.queues import Tenant
from router_ext.core.request import Request
from tests.unit.core.builders import arrival, pool

CONVEX = CostModel(base=10.0, prompt=2.0, output=1.0, cross=0.5, square=0.25)


def request(prompt: int = 100, *, cached: int = 0, sequences: int = 1) -> Request:
    spec = arrival("r0", prompt=prompt, num_sequences=sequences).request
    tenant = Tenant(TenantConfig(tenant=TenantId("a")))
    tier = TierConfig(name=TierName("batch"), rank=1)
    made = Request(spec, tenant=tenant, queue=tenant.queue(tier), seq=1, arrival_s=0.0)
    made.cached_tokens = cached
    return made


def produce(model: CostModel, each: Request, tokens: int) -> float:
    each.output_tokens += tokens
    return model.output(each)


@pytest.mark.parametrize("steps", [[40], [1] * 40, [7, 0, 33]])
def test_the_sum_of_charges_is_the_price_of_what_was_received(steps: list[int]) -> None:
    each = request()
    charged = CONVEX.admit(each) + sum(produce(CONVEX, each, tokens) for tokens in steps)
    assert charged == pytest.approx(CONVEX.service(100, 40))
    assert CONVEX.service(100, 40) == 10 + 2 * 100 + 40 + 0.5 * 100 * 40 + 0.25 * 40 * 40


def test_what_is_sent_and_made_again_costs_nothing() -> None:
    each = request()
    CONVEX.admit(each)
    produce(CONVEX, each, 40)
    each.output_tokens = 30
    each.input_tokens = 130
    assert CONVEX.admit(each) == 0.0
    assert produce(CONVEX, each, 10) == 0.0
    assert produce(CONVEX, each, 1) == pytest.approx(CONVEX.service(100, 41) - CONVEX.service(100, 40))


@pytest.mark.parametrize("true_length", [70, 100, 160])
@pytest.mark.parametrize("produced", [0, 25])
def test_an_estimated_prompt_is_settled_to_the_price_of_the_true_one(true_length: int, produced: int) -> None:
    each = request()
    charged = CONVEX.admit(each) + produce(CONVEX, each, produced)
    each.prompt_tokens = true_length
    charged += CONVEX.correct_prompt(each) + produce(CONVEX, each, 5)
    assert charged == pytest.approx(CONVEX.service(true_length, produced + 5))
    assert each.paid_in == true_length


def test_what_a_prefix_cache_held_at_the_first_dispatch_is_not_charged() -> None:
    model = build_cost(pool(cost_model="uncached"))
    each = request(cached=60)
    assert model.admit(each) == 40.0
    assert each.paid_in == 100
    # Another backend holds nothing of it: that is the system's loss.
    each.cached_tokens = 0
    assert model.admit(each) == 0.0
    each.prompt_tokens = 90
    assert model.correct_prompt(each) == -10.0
    each.prompt_tokens = 50
    assert model.correct_prompt(each) == -30.0
    assert produce(model, each, 3) == 6.0


def test_linear_prices_charge_cached_prompts_in_full() -> None:
    assert LinearCost(prompt=1.0, output=2.0).admit(request(cached=60)) == 100.0


def test_several_sequences_are_charged_as_so_many_requests() -> None:
    each = request(sequences=4)
    charged = CONVEX.admit(each) + produce(CONVEX, each, 40)
    assert charged == pytest.approx(4 * CONVEX.service(100, 10))


@pytest.mark.parametrize("name", COST_MODELS)
def test_what_lies_ahead_is_what_will_be_charged(name: str) -> None:
    model = build_cost(pool(cost_model=name))
    each = request()
    model.admit(each)
    produce(model, each, 10)
    expected = model.ahead(each, 25)
    assert each.paid_out == 10
    assert produce(model, each, 25) == pytest.approx(expected)
    each.output_tokens -= 5
    assert model.ahead(each, 5) == 0.0
    assert model.ahead(each, 6) > 0.0
