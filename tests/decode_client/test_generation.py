"""What a generation says, when it says it, and what it counts."""

import asyncio

import msgspec
import pytest

from engines.protocol import JobFailed, Token
from kvcache.control import AnswerEnded, Cancelled, Delta, Failed, Finished, TokenLogprob
from tests.pair import pair
from tests.stages import reach, release


def deltas(nodes, job):
    return [m for m in nodes.decode.reports if isinstance(m, Delta) and m.generation == job.generation]


def in_place(job):
    return msgspec.structs.replace(job.generate, source=None)


async def test_tokens_text_and_usage_add_up(tokenizer):
    async with pair(tokenizer) as nodes:
        nodes.decode.engine.speech = tokenizer.encode("hello 😀 there", add_special_tokens=False).ids
        job = nodes.job(300, max_tokens=100)
        nodes.start(job)
        finished = await nodes.decode.ended(job.generation)
        assert nodes.decode.text(job.generation) == "hello 😀 there"
        assert [t for d in deltas(nodes, job) for t in d.token_ids] == nodes.decode.engine.speech
        assert finished == Finished(job.generation, "length", 300, len(nodes.decode.engine.speech), 0, None)
        assert nodes.decode.reports.index(finished) > nodes.decode.reports.index(deltas(nodes, job)[-1])


@pytest.mark.parametrize("include_stop", [False, True])
async def test_a_stop_string_ends_the_engines_job_and_nothing_after_it_is_said(tokenizer, include_stop):
    async with pair(tokenizer) as nodes:
        said = tokenizer.encode("one two END three four", add_special_tokens=False).ids
        nodes.decode.engine.speech = said * 50
        job = nodes.job(stops=("END",), max_tokens=10_000, include_stop=include_stop)
        nodes.start(job)
        finished = await nodes.decode.ended(job.generation)
        assert nodes.decode.text(job.generation) == ("one two END" if include_stop else "one two ")
        assert (finished.reason, finished.stop_text) == ("stop", "END")
        counted = [t for d in deltas(nodes, job) for t in d.token_ids]
        assert tokenizer.decode(counted).rstrip() == "one two END"
        assert finished.completion_tokens == len(counted)
        await nodes.idle()
        assert nodes.decode.engine.generated == []


async def test_text_that_may_begin_a_stop_string_waits_for_the_next_token(tokenizer):
    async with pair(tokenizer) as nodes:
        nodes.decode.engine.speech = tokenizer.encode("a EN", add_special_tokens=False).ids
        job = nodes.job(stops=("END",))
        nodes.start(job)
        finished = await nodes.decode.ended(job.generation)
        said = deltas(nodes, job)
        assert "".join(d.text for d in said[:-1]) == "a "
        assert said[-1].text == "EN"
        assert (finished.reason, finished.stop_text) == ("length", None)


async def test_every_token_leaves_at_once_unless_others_come_in_the_same_turn(tokenizer):
    async with pair(tokenizer) as nodes:
        nodes.decode.engine.voice.clear()
        nodes.decode.engine.speech = [7, 8, 9]
        job = nodes.job()
        nodes.decode.asking.accept(in_place(job))
        await nodes.decode.until(lambda: job.generation in nodes.decode.engine.jobs)
        stream = nodes.decode.engine._streams[job.generation]
        stream.put(Token(job.generation, 50))
        await nodes.decode.told(Delta, job.generation)
        assert deltas(nodes, job)[0].token_ids == (50,)
        for token in (51, 52, 53):
            stream.put(Token(job.generation, token))
        await nodes.decode.until(lambda: len(deltas(nodes, job)) > 1)
        assert deltas(nodes, job)[1].token_ids == (51, 52, 53)
        release(nodes)


async def test_logprobs_travel_with_their_tokens(tokenizer):
    async with pair(tokenizer) as nodes:
        nodes.decode.engine.voice.clear()
        job = nodes.job()
        nodes.decode.asking.accept(in_place(job))
        await nodes.decode.until(lambda: job.generation in nodes.decode.engine.jobs)
        logprobs = (TokenLogprob(50, -0.5), TokenLogprob(51, -1.5))
        nodes.decode.engine._streams[job.generation].put(Token(job.generation, 50, logprobs))
        assert (await nodes.decode.told(Delta, job.generation)).logprobs == (logprobs,)
        release(nodes)


async def test_pages_are_freed_as_soon_as_the_engine_has_copied_them(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        await reach(nodes, job, "speaking")
        assert nodes.decode.pages.owners == {}
        assert nodes.decode.asking.running == 1
        release(nodes)


async def test_a_generation_without_a_source_prefills_in_place_and_takes_no_pages(tokenizer):
    async with pair(tokenizer, decode_pages=1) as nodes:
        nodes.decode.engine.voice.clear()
        job = nodes.job(300)
        nodes.decode.asking.accept(in_place(job))
        await nodes.decode.until(lambda: nodes.decode.asking.running)
        assert nodes.decode.asking.queued_tokens == 300
        assert nodes.decode.pages.owners == {}
        release(nodes)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        assert nodes.decode.asking.queued_tokens == 0


async def test_committed_bytes_that_the_engine_refuses_fail_the_load(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job()
        await reach(nodes, job, "loading")
        page = next(iter(nodes.decode.pages._owned.values()))[0]
        nodes.decode.pool.buffer[page * 4096] ^= 1
        release(nodes)
        failed = await nodes.decode.ended(job.generation)
        assert (failed.stage, failed.cause) == ("load", "corrupt")
        nodes.decode.engine.faults.clear()


@pytest.mark.parametrize("changes", [{"token_ids": ()}, {"stop": ("",)}])
async def test_an_order_that_makes_no_sense_is_refused(tokenizer, changes):
    async with pair(tokenizer) as nodes:
        order = in_place(nodes.job())
        if "stop" in changes:
            order = msgspec.structs.replace(order, sampling=msgspec.structs.replace(order.sampling, **changes))
        else:
            order = msgspec.structs.replace(order, **changes)
        nodes.decode.asking.accept(order)
        failed = await nodes.decode.ended(order.generation)
        assert isinstance(failed, Failed)
        assert (failed.stage, failed.cause) == ("queue", "bad_order")


async def test_generations_are_bounded(tokenizer):
    async with pair(tokenizer, max_jobs=1) as nodes:
        nodes.decode.engine.voice.clear()
        first, second = nodes.job(), nodes.job()
        nodes.decode.asking.accept(in_place(first))
        nodes.decode.asking.accept(in_place(second))
        assert (await nodes.decode.ended(second.generation)).cause == "queue_full"
        release(nodes)
        assert isinstance(await nodes.decode.ended(first.generation), Finished)


async def test_a_job_that_is_ordered_twice_is_done_once(tokenizer):
    async with pair(tokenizer) as nodes:
        nodes.decode.engine.voice.clear()
        order = in_place(nodes.job())
        for _ in range(3):
            nodes.decode.asking.accept(order)
        await nodes.decode.until(lambda: nodes.decode.asking.running)
        release(nodes)
        assert isinstance(await nodes.decode.ended(order.generation), Finished)
        await nodes.idle()
        assert len(nodes.decode.engine.commands) == 1
        assert len([m for m in nodes.decode.reports if isinstance(m, Finished)]) == 1


async def test_one_transfer_feeds_one_generation(tokenizer):
    async with pair(tokenizer) as nodes:
        nodes.prefill.engine.gate.clear()
        job = nodes.job()
        nodes.start(job)
        nodes.decode.asking.accept(msgspec.structs.replace(job.generate, generation="again.1"))
        failed = await nodes.decode.ended("again.1")
        assert "another job" in failed.detail
        release(nodes)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)


async def test_an_engine_that_keeps_a_cancelled_job_is_ended_and_the_pages_come_back(tokenizer):
    async with pair(tokenizer, engine_patience_s=0.2) as nodes:
        job = nodes.job()
        await reach(nodes, job, "loading")

        async def deaf(name):
            await asyncio.sleep(0)

        nodes.decode.engine.cancel = deaf
        nodes.decode.asking.cancel(job.generation)
        assert isinstance(await nodes.decode.ended(job.generation), Cancelled)
        assert nodes.decode.engine.lost == "closed"
        assert nodes.decode.pages.owners == {}


async def test_several_answers_are_spoken_from_one_fetch_and_counted_together(tokenizer):
    async with pair(tokenizer) as nodes:
        nodes.decode.engine.speech = tokenizer.encode("hello there", add_special_tokens=False).ids
        job = nodes.job(300, max_tokens=100, answers=3, seed=7)
        nodes.start(job)
        finished = await nodes.decode.ended(job.generation)
        each = len(nodes.decode.engine.speech)
        assert finished == Finished(job.generation, "length", 300, 3 * each, 0, None)
        for answer in range(3):
            said = [d for d in deltas(nodes, job) if d.answer == answer]
            assert "".join(d.text for d in said) == "hello there"
        ends = [m for m in nodes.decode.reports if isinstance(m, AnswerEnded)]
        assert sorted(end.answer for end in ends) == [0, 1, 2]
        assert nodes.prefill.engine.prefilled == [job.transfer]
        commands = nodes.decode.engine.commands
        assert [command.sampling.seed for command in commands] == [8, 9, 7]
        assert [command.beside for command in commands] == [job.generation, job.generation, ""]
        await nodes.idle()
        assert nodes.decode.pages.owners == {}


async def test_an_answer_that_meets_its_stop_string_lets_the_others_go_on(tokenizer):
    async with pair(tokenizer) as nodes:
        nodes.decode.engine.voice.clear()
        job = nodes.job(stops=("END",), answers=2)
        nodes.decode.asking.accept(in_place(job))
        await nodes.decode.until(lambda: job.generation in nodes.decode.engine.jobs)
        streams = nodes.decode.engine._streams
        for token in tokenizer.encode("a END", add_special_tokens=False).ids:
            streams[f"{job.generation}#1"].put(Token(f"{job.generation}#1", token))
        ended = await nodes.decode.told(AnswerEnded, job.generation)
        assert (ended.answer, ended.reason, ended.stop_text) == (1, "stop", "END")
        streams[job.generation].put(Token(job.generation, 50))
        await nodes.decode.until(lambda: any(d.answer == 0 for d in deltas(nodes, job)))
        release(nodes)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)


async def test_a_cancel_ends_every_answer_and_gives_back_what_they_hold(tokenizer):
    async with pair(tokenizer) as nodes:
        job = nodes.job(answers=3)
        await reach(nodes, job, "loading")
        assert len(nodes.decode.engine.jobs) == 3
        assert nodes.decode.pages.owners != {}
        nodes.decode.asking.cancel(job.generation)
        assert isinstance(await nodes.decode.ended(job.generation), Cancelled)
        assert nodes.decode.engine.jobs == set()
        assert nodes.decode.pages.owners == {}


async def test_an_answer_that_fails_ends_the_others(tokenizer):
    async with pair(tokenizer) as nodes:
        nodes.decode.engine.voice.clear()
        job = nodes.job(answers=3)
        nodes.decode.asking.accept(in_place(job))
        await nodes.decode.until(lambda: len(nodes.decode.engine.jobs) == 3)
        name = f"{job.generation}#2"
        nodes.decode.engine._streams[name].put(JobFailed(name, "engine_error", "scripted"))
        failed = await nodes.decode.ended(job.generation)
        assert (failed.cause, failed.detail) == ("engine_error", "scripted")
        assert nodes.decode.asking.running == 0
        await nodes.idle()
        assert not [m for m in nodes.decode.reports if isinstance(m, AnswerEnded)]


async def test_more_answers_than_a_node_gives_are_refused(tokenizer):
    async with pair(tokenizer, max_answers=2) as nodes:
        order = in_place(nodes.job(answers=3))
        nodes.decode.asking.accept(order)
        failed = await nodes.decode.ended(order.generation)
        assert (failed.cause, failed.detail[:8]) == ("bad_order", "answers:")
