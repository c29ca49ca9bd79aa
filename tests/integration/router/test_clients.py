"""Real clients, unchanged, against the router; what they were told is what was booked."""

from __future__ import annotations

import pytest
from huggingface_hub import InferenceClient
from openai import OpenAI
from support.tenants import Tenant
from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError

# The package is older than the pydantic it runs on.
pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")

PROMPT = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": PROMPT}]


def test_text_generation_generates(tenant: Tenant) -> None:
    client = Client(tenant.base, headers=tenant.headers)
    answer = client.generate(PROMPT, max_new_tokens=12)
    assert answer.details.generated_tokens == 12 == len(answer.details.tokens)
    assert answer.details.finish_reason == "length"
    (event,) = tenant.usage(1)
    assert (event.output_tokens, event.prompt_tokens, event.outcome) == (12, 7, "completed")
    assert (event.dialect, event.model) == ("compat", "main")


def test_text_generation_streams(tenant: Tenant) -> None:
    client = Client(tenant.base, headers=tenant.headers)
    events = list(client.generate_stream(PROMPT, max_new_tokens=12))
    assert len(events) == 12
    assert events[-1].generated_text == "".join(e.token.text for e in events if not e.token.special)
    assert tenant.usage(1)[0].output_tokens == 12


async def test_text_generation_async(tenant: Tenant) -> None:
    client = AsyncClient(tenant.base, headers=tenant.headers)
    answer = await client.generate(PROMPT, max_new_tokens=9)
    events = [event async for event in client.generate_stream(PROMPT, max_new_tokens=9)]
    assert answer.generated_text == events[-1].generated_text
    assert [e.output_tokens for e in tenant.usage(2)] == [9, 9]


def test_text_generation_gets_its_own_errors(tenant: Tenant) -> None:
    client = Client(tenant.base, headers=tenant.headers)
    with pytest.raises(ValidationError, match=r"must be <= 2048\. Given: 1800 `inputs` tokens and 1024"):
        client.generate(" word" * 1_800, max_new_tokens=1_024)
    with pytest.raises(ValidationError, match="truncate"):
        list(client.generate_stream(PROMPT, truncate=9_999))


def test_huggingface_hub_text_generation(tenant: Tenant) -> None:
    client = InferenceClient(base_url=tenant.base, api_key=tenant.key)
    whole = client.text_generation(PROMPT, max_new_tokens=10, details=True)
    assert whole.details is not None
    assert whole.details.generated_tokens == 10
    text = "".join(client.text_generation(PROMPT, max_new_tokens=10, stream=True))
    assert PROMPT + text == whole.generated_text
    assert sum(e.output_tokens for e in tenant.usage(2)) == 20


def test_huggingface_hub_chat(tenant: Tenant) -> None:
    client = InferenceClient(base_url=tenant.base, api_key=tenant.key)
    whole = client.chat_completion(MESSAGES, max_tokens=10, temperature=0)
    assert whole.usage.completion_tokens == 10
    pieces = list(client.chat_completion(MESSAGES, max_tokens=10, temperature=0, stream=True))
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.choices[0].message.content
    assert [e.prompt_tokens for e in tenant.usage(2)] == [whole.usage.prompt_tokens] * 2


def test_openai_chat(tenant: Tenant) -> None:
    with OpenAI(base_url=tenant.base + "/v1", api_key=tenant.key, max_retries=0) as client:
        whole = client.chat.completions.create(model="main", messages=MESSAGES, max_tokens=8, temperature=0)
        chunks = list(
            client.chat.completions.create(
                model="smol",
                messages=MESSAGES,
                max_tokens=8,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert whole.model == "main"
    assert {chunk.model for chunk in chunks} == {"smol"}
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8
    assert [e.output_tokens for e in tenant.usage(2)] == [8, 8]


def test_openai_completions_and_models(tenant: Tenant) -> None:
    with OpenAI(base_url=tenant.base + "/v1", api_key=tenant.key, max_retries=0) as client:
        whole = client.completions.create(model="main", prompt=[PROMPT, "Once"], max_tokens=6, temperature=0)
        one = client.completions.create(model="main", prompt=PROMPT, max_tokens=6, temperature=0, stream=True)
        text = "".join(chunk.choices[0].text for chunk in one)
        models = [model.id for model in client.models.list()]
    assert models == ["main"]
    assert sorted(choice.index for choice in whole.choices) == [0, 1]
    assert whole.usage.completion_tokens == 12
    assert next(choice.text for choice in whole.choices if choice.index == 0) == text
    first, second = tenant.usage(2)
    # One request, one line in the books, whatever the number of its prompts.
    assert (first.output_tokens, first.prompt_tokens, second.output_tokens) == (12, whole.usage.prompt_tokens, 6)


def test_openai_streams_several_prompts(tenant: Tenant) -> None:
    with OpenAI(base_url=tenant.base + "/v1", api_key=tenant.key, max_retries=0) as client:
        chunks = list(
            client.completions.create(model="main", prompt=["One", "Two"], max_tokens=5, temperature=0, stream=True)
        )
    counts = [sum(c.choices[0].index == index for c in chunks) for index in (0, 1)]
    assert counts == [5, 5]
    assert tenant.usage(1)[0].output_tokens == 10
