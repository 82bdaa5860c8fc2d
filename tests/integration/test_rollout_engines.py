"""Both rollout engines against plain transformers: numbers, new weights, lifetime."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engine_cases import (
    CONTEXT,
    END,
    VOCABULARY,
    ModelSource,
    collect,
    generate,
    held_at,
    load,
    load_weights,
    logprob_error,
    make_engine,
    make_mixture,
    make_model,
    make_sender,
    perturbed,
    prompts,
    publish,
    reference_logits,
    requests,
    weights_of,
)
from safetensors.torch import load_file

from rlx.core.engine.interfaces import WeightsUpdate
from rlx.core.engine.rollout.async_engine import AsyncEngine
from rlx.core.errors import EngineError

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder)


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def shared(request: pytest.FixtureRequest, folder: Path) -> Iterator[AsyncEngine]:
    """One engine for the tests that leave the weights alone."""
    engine = make_engine(request.param, folder)
    yield engine
    asyncio.run(engine.stop())


@pytest.fixture(params=["vllm", "transformers"])
def fresh(request: pytest.FixtureRequest, folder: Path) -> Iterator[AsyncEngine]:
    """An engine of the test's own."""
    engine = make_engine(request.param, folder)
    yield engine
    asyncio.run(engine.stop())


def test_greedy_tokens_are_the_most_likely_ones(shared: AsyncEngine, model: Any) -> None:
    wanted = requests(prompts(12), temperature=0.0)
    found = generate(shared, wanted)
    for request, generation in zip(wanted, found, strict=True):
        logits = reference_logits(model, request.prompt, generation.tokens)
        assert generation.tokens.tolist() == logits.argmax(-1).tolist()
    assert logprob_error(model, wanted, found) < 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_tempered_distribution(
    shared: AsyncEngine, model: Any, temperature: float
) -> None:
    wanted = requests(prompts(24), temperature=temperature)
    found = generate(shared, wanted)
    assert logprob_error(model, wanted, found, temperature=temperature) < 1e-4
    assert all(item.tokens.dtype == np.int32 for item in found)
    assert all(item.logprobs.dtype == np.float32 for item in found)


def test_filtered_sampling_reports_renormalised_logprobs(shared: AsyncEngine, model: Any) -> None:
    wanted = requests(prompts(12), top_k=3)
    for request, generation in zip(wanted, generate(shared, wanted), strict=True):
        logits = reference_logits(model, request.prompt, generation.tokens)
        values, indices = logits.topk(3)
        position = (indices == torch.from_numpy(generation.tokens)[:, None]).nonzero()
        assert len(position) == len(generation.tokens), "a token outside the top 3 was sampled"
        expected = values.log_softmax(-1)[position[:, 0], position[:, 1]]
        assert np.abs(expected.numpy() - generation.logprobs).max() < 1e-4


def test_top_p_never_samples_outside_the_nucleus(shared: AsyncEngine, model: Any) -> None:
    wanted = requests(prompts(12), top_p=0.5)
    for request, generation in zip(wanted, generate(shared, wanted), strict=True):
        probabilities = reference_logits(model, request.prompt, generation.tokens).softmax(-1)
        ordered, order = probabilities.sort(descending=True)
        inside = ordered.cumsum(-1) - ordered < 0.5 + 1e-5
        rank = (order == torch.from_numpy(generation.tokens)[:, None]).nonzero()[:, 1]
        assert inside[torch.arange(len(rank)), rank].all()


def test_sampled_frequencies_follow_the_distribution(shared: AsyncEngine, model: Any) -> None:
    prompt = prompts(1)[0]
    wanted = requests([prompt] * 4000, new=1)
    drawn = [int(item.tokens[0]) for item in generate(shared, wanted)]
    expected = reference_logits(model, prompt, np.array([2]))[0].softmax(-1).numpy()
    counts = np.bincount(drawn, minlength=VOCABULARY)
    deviation = np.abs(counts / 4000 - expected)
    assert (deviation < 5 * np.sqrt(expected * (1 - expected) / 4000) + 1e-3).all()


def test_seed_decides_the_sample(shared: AsyncEngine) -> None:
    prompt = prompts(1)[0]
    same = [replace(item, seed=7) for item in requests([prompt] * 2)]
    first, second = generate(shared, same)
    assert first.tokens.tolist() == second.tokens.tolist()
    other = generate(shared, requests([prompt] * 8))
    assert len({tuple(item.tokens.tolist()) for item in other}) == 8


def test_stop_token_ends_the_text_and_belongs_to_it(shared: AsyncEngine) -> None:
    prompt = prompts(1)[0]
    whole = generate(shared, requests([prompt], new=24))[0]
    stop = int(whole.tokens[5])
    cut = generate(shared, requests([prompt], new=24, stop_token_ids=(stop,)))[0]
    first = whole.tokens.tolist().index(stop)
    assert cut.finish_reason == "stop"
    assert cut.tokens.tolist() == whole.tokens.tolist()[: first + 1]
    assert len(cut.logprobs) == len(cut.tokens)


def test_end_of_sequence_token_stops_without_being_asked_for(shared: AsyncEngine) -> None:
    found = generate(shared, requests(prompts(200), new=40))
    stopped = [item for item in found if item.finish_reason == "stop"]
    cut = [item for item in found if item.finish_reason == "length"]
    assert stopped
    assert cut
    assert all(item.tokens[-1] == END and END not in item.tokens[:-1] for item in stopped)
    assert all(len(item.tokens) == 40 and END not in item.tokens for item in cut)


def test_requests_of_different_lengths_and_limits_share_a_batch(
    shared: AsyncEngine, model: Any
) -> None:
    wanted = [
        replace(item, sampling=replace(item.sampling, max_new_tokens=1 + index % 30))
        for index, item in enumerate(requests(prompts(100, longest=200)))
    ]
    found = generate(shared, wanted)
    assert logprob_error(model, wanted, found) < 1e-4
    assert all(
        len(item.tokens) == request.sampling.max_new_tokens or item.tokens[-1] == END
        for request, item in zip(wanted, found, strict=True)
    )


def test_impossible_requests_are_refused_by_name(shared: AsyncEngine) -> None:
    long = requests([[2] * 250])
    with pytest.raises(EngineError, match=rf"250 prompt \+ 16 new = 266 .* context is {CONTEXT}"):
        generate(shared, long)
    with pytest.raises(EngineError, match="empty prompt"):
        generate(shared, requests([[2, 3], []]))
    with pytest.raises(EngineError, match=f"token {VOCABULARY} is not in"):
        generate(shared, requests([[VOCABULARY]]))
    assert len(generate(shared, requests(prompts(2)))) == 2, "the engine still serves"


def test_no_requests_give_no_generations(shared: AsyncEngine) -> None:
    assert generate(shared, []) == []


def test_abort_hands_out_what_was_sampled(shared: AsyncEngine, model: Any) -> None:
    wanted = requests(prompts(80), new=150)

    async def run() -> list[Any]:
        task = asyncio.create_task(collect(shared, wanted))
        async with held_at(shared, 6):
            abort = asyncio.create_task(shared.abort())
            await asyncio.sleep(0)
        await abort
        return await task

    found = asyncio.run(run())
    aborted = [item for item in found if item.finish_reason == "abort"]
    started = [index for index, item in enumerate(found) if len(item.tokens)]
    assert aborted
    assert len(found) == 80
    assert all(len(item.tokens) == len(item.logprobs) for item in found)
    assert started
    partial = [found[index] for index in started]
    assert logprob_error(model, [wanted[index] for index in started], partial) < 1e-4
    assert not shared._core.busy()


def test_cancelled_consumer_leaves_nothing_running(shared: AsyncEngine) -> None:
    async def run() -> None:
        task = asyncio.create_task(collect(shared, requests(prompts(40), new=150)))
        async with held_at(shared, 6):
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # Commands run in order: when this one is answered, the cancelled requests are gone.
        await shared.abort()

    asyncio.run(run())
    assert not shared._core.busy()
    assert not shared._calls


def test_concurrent_calls_get_their_own_answers(shared: AsyncEngine, model: Any) -> None:
    first = requests(prompts(20), new=12)
    second = requests(prompts(30)[20:], new=30)

    async def run() -> list[Any]:
        return await asyncio.gather(collect(shared, first), collect(shared, second))

    one, two = asyncio.run(run())
    assert logprob_error(model, first, one) < 1e-4
    assert logprob_error(model, second, two) < 1e-4


def test_new_weights_are_used_at_once_and_old_prefixes_forgotten(
    fresh: AsyncEngine, folder: Path, tmp_path: Path
) -> None:
    # Two whole blocks of the prefix cache and more, so that a stale one would show.
    wanted = requests(prompts(8, shortest=90, longest=120), temperature=0.0)
    assert logprob_error(load(folder), wanted, generate(fresh, wanted)) < 1e-4
    for version in (1, 2):
        changed = perturbed(folder, seed=version)
        sent, [report] = asyncio.run(publish(weights_of(changed), version, fresh))
        assert (report.version, report.checksum) == (version, sent.checksum)
        found = generate(fresh, wanted)
        for request, generation in zip(wanted, found, strict=True):
            logits = reference_logits(changed, request.prompt, generation.tokens)
            assert generation.tokens.tolist() == logits.argmax(-1).tolist()
            assert generation.version == version
        assert logprob_error(changed, wanted, found) < 1e-4


def test_weights_loaded_in_flight_are_used_from_the_next_token(
    fresh: AsyncEngine, folder: Path, tmp_path: Path
) -> None:
    old, changed = load(folder), perturbed(folder)
    wanted = requests(prompts(4), new=170)

    async def run() -> list[Any]:
        task = asyncio.create_task(collect(fresh, wanted))
        async with held_at(fresh, 6):
            load = asyncio.create_task(publish(weights_of(changed), 1, fresh))
            await asyncio.sleep(0.2)
        await load
        return await task

    longest = 0
    for request, generation in zip(wanted, asyncio.run(run()), strict=True):
        count = len(generation.tokens)
        assert generation.version == 0, "the version is the one at the start of the request"
        assert list(generation.versions) == ([(0, 6), (1, count - 6)] if count > 6 else [])
        index = torch.from_numpy(generation.tokens).long()[:, None]
        for model, part in ((old, slice(0, 6)), (changed, slice(6, None))):
            logits = reference_logits(model, request.prompt, generation.tokens)
            expected = logits.log_softmax(-1).gather(1, index)[:, 0].numpy()
            assert np.abs(expected - generation.logprobs)[part].max(initial=0) < 1e-4
        longest = max(longest, len(generation.tokens))
    assert longest > 6


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_weights_arrive_under_checkpoint_names(kind: str, tmp_path: Path) -> None:
    """Experts are fused in a transformers model and split in files; learners write the latter."""
    folder = make_mixture(tmp_path / "model")
    changed = perturbed(folder)
    changed.save_pretrained(tmp_path / "changed")
    weights = ModelSource(load_file(tmp_path / "changed" / "model.safetensors"))
    wanted = requests(prompts(6), temperature=0.0)
    engine = make_engine(kind, folder)
    try:
        assert logprob_error(load(folder), wanted, generate(engine, wanted)) < 1e-4
        asyncio.run(publish(weights, 1, engine))
        assert logprob_error(changed, wanted, generate(engine, wanted)) < 1e-4
    finally:
        asyncio.run(engine.stop())


def test_capped_scores_of_attention_are_capped(tmp_path: Path) -> None:
    """transformers takes sdpa by itself, which leaves the cap out."""
    from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attn_logit_softcapping=0.5,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    truth = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    wanted = requests(prompts(4))
    engine = make_engine("transformers", tmp_path)
    try:
        found = generate(engine, wanted)
    finally:
        asyncio.run(engine.stop())
    assert logprob_error(truth, wanted, found) < 1e-4
    assert logprob_error(load(tmp_path), wanted, found) > 1e-2


@pytest.mark.parametrize("change", ["lack", "unknown", "shape"])
def test_weights_of_another_model_are_refused(
    change: str, folder: Path, model: Any, tmp_path: Path
) -> None:
    tensors = {name: value.detach().clone() for name, value in model.named_parameters()}
    if change == "lack":
        del tensors["model.norm.weight"]
    elif change == "unknown":
        tensors["model.extra"] = torch.zeros(3)
    else:
        tensors["model.norm.weight"] = torch.zeros(3)
    for kind in ("transformers", "vllm"):
        engine = make_engine(kind, folder)
        try:
            with pytest.raises(EngineError):
                asyncio.run(publish(ModelSource(tensors), 1, engine))
            with pytest.raises(EngineError, match="failed"):
                generate(engine, requests(prompts(1)))
        finally:
            asyncio.run(engine.stop())


def test_runs_repeat_bit_for_bit(fresh: AsyncEngine, folder: Path, tmp_path: Path) -> None:
    wanted = requests([prompt for prompt in prompts(16) for _ in range(4)])
    kind = type(fresh._core).__name__.removesuffix("Core").lower()
    another = make_engine(kind, folder)
    try:
        runs = [generate(fresh, wanted), generate(another, wanted)]
    finally:
        asyncio.run(another.stop())
    load_weights(fresh, load(folder), 0)
    runs.append(generate(fresh, wanted))
    for other in runs[1:]:
        for first, second in zip(runs[0], other, strict=True):
            assert first.tokens.tobytes() == second.tokens.tobytes()
            assert first.logprobs.tobytes() == second.logprobs.tobytes()


def test_failure_of_the_engine_reaches_every_caller(
    fresh: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise RuntimeError("out of memory, say")

    async def run() -> list[Any]:
        calls = [collect(fresh, requests(prompts(2))) for _ in range(3)]
        return await asyncio.gather(*calls, return_exceptions=True)

    monkeypatch.setattr(fresh._core, "step", broken)
    for error in asyncio.run(run()):
        assert isinstance(error, EngineError)
        assert "RuntimeError: out of memory, say" in str(error)
        copy = pickle.loads(pickle.dumps(error))
        assert any("in broken" in note for note in copy.__notes__), "the traceback travels"
    with pytest.raises(EngineError, match="out of memory"):
        generate(fresh, requests(prompts(1)))


def test_stop_ends_the_thread_and_fails_who_waits(fresh: AsyncEngine) -> None:
    name = fresh._name
    assert any(thread.name == name for thread in threading.enumerate())

    before = set(psutil.Process().children(recursive=True))

    async def run() -> None:
        task = asyncio.create_task(collect(fresh, requests(prompts(8), new=170)))
        async with held_at(fresh, 6):
            stop = asyncio.create_task(fresh.stop())
            await asyncio.sleep(0)
        await stop
        with pytest.raises(EngineError, match="stopped"):
            await task
        with pytest.raises(EngineError, match="not running"):
            await collect(fresh, requests(prompts(1)))
        await fresh.stop()

    asyncio.run(run())
    assert not any(thread is fresh._thread for thread in threading.enumerate())
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_a_model_that_does_not_load_is_an_engine_error(kind: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"the worker '{kind}' failed"):
        make_engine(kind, tmp_path)


def _attention_changed(folder: Path) -> tuple[Any, ModelSource]:
    """A model with other weights in the attention of layer 1, and those weights."""
    changed = load(folder)
    generator = torch.Generator().manual_seed(5)
    weights = {}
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if name.startswith("model.layers.1.self_attn."):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
                weights[name] = parameter.detach()
    return changed, ModelSource(weights)


def test_a_part_of_the_weights_can_follow_all_of_them(fresh: AsyncEngine, folder: Path) -> None:
    wanted = requests(prompts(8), temperature=0.0)
    sender = make_sender()
    load_weights(fresh, perturbed(folder), 2, sender=sender)
    load_weights(fresh, load(folder), 3, sender=sender)
    changed, part = _attention_changed(folder)
    sent, _ = asyncio.run(publish(part, 4, fresh, base=3, sender=sender))
    assert sent.bytes == sum(tensor.nbytes for tensor in part.tensors.values())
    found = generate(fresh, wanted)
    assert logprob_error(changed, wanted, found) < 1e-4
    assert logprob_error(load(folder), wanted, found) > 1e-3
    assert {item.version for item in found} == {4}
    late = make_engine(type(fresh._core).__name__.removesuffix("Core").lower(), folder)
    try:
        asyncio.run(
            late.load_weights(WeightsUpdate(link=sender._link, number=2, version=4, base=3))
        )
        assert logprob_error(changed, wanted, generate(late, wanted)) < 1e-4, "it has all of them"
    finally:
        asyncio.run(late.stop())
    final = perturbed(folder)
    load_weights(fresh, final, 5, sender=sender)
    assert logprob_error(final, wanted, generate(fresh, wanted)) < 1e-4


def test_the_tied_embedding_can_be_the_part(folder: Path) -> None:
    """vLLM keeps a packed copy of it for the output head."""
    changed, wanted = load(folder), requests(prompts(8), temperature=0.0)
    with torch.no_grad():
        changed.model.embed_tokens.weight += 0.1 * torch.randn_like(
            changed.model.embed_tokens.weight
        )
    part = ModelSource({"model.embed_tokens.weight": changed.model.embed_tokens.weight.detach()})
    engine, sender = make_engine("vllm", folder), make_sender()
    try:
        load_weights(engine, load(folder), 0, sender=sender)
        asyncio.run(publish(part, 1, engine, base=0, sender=sender))
        assert logprob_error(changed, wanted, generate(engine, wanted)) < 1e-4
    finally:
        asyncio.run(engine.stop())


def test_a_part_of_what_vllm_holds_as_one_is_refused(folder: Path) -> None:
    """Query, key and value are one tensor there: a query alone would leave the others random."""
    _, part = _attention_changed(folder)
    query = {name: tensor for name, tensor in part.tensors.items() if "q_proj" in name}
    engine, sender = make_engine("vllm", folder), make_sender()
    try:
        load_weights(engine, load(folder), 0, sender=sender)
        with pytest.raises(EngineError, match=r"lack a part of model\.layers\.1\..*qkv_proj"):
            asyncio.run(publish(ModelSource(query), 1, engine, base=0, sender=sender))
        with pytest.raises(EngineError, match="failed"):
            generate(engine, requests(prompts(1)))
    finally:
        asyncio.run(engine.stop())


def test_an_engine_whose_learner_fails_midway_samples_no_more(
    fresh: AsyncEngine, folder: Path
) -> None:
    class Broken(ModelSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(super().__iter__()):
                if number == 15:
                    raise ValueError("out of memory, say")
                yield item

    sender = make_sender()
    source = Broken(weights_of(perturbed(folder)).tensors)

    async def run() -> None:
        loading = asyncio.create_task(fresh.load_weights(sender.offer(1, None)))
        with pytest.raises(ValueError, match="out of memory"):
            await asyncio.to_thread(sender.send, source, 1)
        with pytest.raises(EngineError, match="the learner gave up: out of memory, say"):
            await loading

    asyncio.run(run())
    with pytest.raises(EngineError, match="the learner gave up"):
        generate(fresh, requests(prompts(1)))
