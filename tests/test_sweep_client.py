"""One timed request against a transport that moves a clock: figures are exact, nothing waits."""

import asyncio
import json

import pytest
from sweep_server import event

httpx = pytest.importorskip("httpx")

from memledger.sweep import client as sending  # noqa: E402
from memledger.sweep import server  # noqa: E402

HEAD = {"content-type": "text/event-stream; charset=utf-8"}
DONE = b"data: [DONE]\n\n"


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Scripted(httpx.AsyncByteStream):
    """Blocks of bytes, each after so many seconds; an exception in place of bytes is raised."""

    def __init__(self, clock, script):
        self.clock, self.script = clock, script

    async def __aiter__(self):
        for wait, block in self.script:
            self.clock.now += wait
            if isinstance(block, Exception):
                raise block
            yield block


def send(script, *, status=200, headers=HEAD, most=4, clock=None, engine=True, handler=None):
    """The outcome of one request that is answered with a script, and what was sent."""
    clock, sent = clock or Clock(), []

    def answer(request):
        sent.append(request)
        return httpx.Response(status, headers=headers, stream=Scripted(clock, script))

    async def run():
        transport = httpx.MockTransport(handler or answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://x/") as client:
            said = sending.body("m", [1, 2, 3], most, engine=engine)
            return await sending.complete(client, said, within_s=60, began=90.0, clock=clock)

    return asyncio.run(run()), sent


def token(text="x"):
    return event({"choices": [{"text": text}]})


def usage(prompt=3, output=4, **more):
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, **more}})


GOOD = [(0.5, token()), (0.25, token()), (0.5, token("")), (0.25, token()), (0.125, usage() + DONE)]


def test_times_are_counted_from_just_before_it_is_sent():
    found, _ = send(GOOD)
    assert (found.sent_s, found.first_s, found.last_s, found.ended_s) == (10.0, 0.5, 1.5, 1.625)
    assert found.longest_gap_s == 0.5
    assert found.tpot_s == pytest.approx(1.0 / 3)
    assert (found.chunks, found.prompt_tokens, found.output_tokens, found.error, found.doubt) == (4, 3, 4, None, None)


def test_a_piece_of_several_tokens_is_counted_by_the_servers_figure():
    found, _ = send([(1.0, token("a b")), (1.0, token("c d")), (0.0, usage() + DONE)])
    assert (found.chunks, found.output_tokens, found.tpot_s) == (2, 4, pytest.approx(1.0 / 3))


def test_what_is_sent():
    said = json.loads(send(GOOD)[1][0].content)
    assert said["prompt"] == [1, 2, 3]
    assert (said["max_tokens"], said["temperature"], said["stream"], said["ignore_eos"]) == (4, 0, True, True)
    assert said["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in json.loads(send(GOOD, engine=False)[1][0].content)


def test_tokens_of_the_prefix_cache():
    told = usage(prompt_tokens_details={"cached_tokens": 2})
    assert send([(0.1, token()), (0.1, told + DONE)], most=4)[0].cached_tokens == 2


@pytest.mark.parametrize(
    ("script", "doubt"),
    [
        ([(0.1, token()), (0.1, usage(output=9) + DONE)], "9 output tokens of at most 4"),
        ([(0.1, token()), *[(0.1, token())] * 3, (0.1, usage(output=1) + DONE)], "1 output tokens, in 4 pieces"),
        ([(0.1, token()), (0.1, usage(output=0) + DONE)], "no output tokens"),
        ([(0.1, token()), (0.1, DONE)], "says no usage"),
    ],
)
def test_a_count_that_contradicts_what_came_is_not_believed(script, doubt):
    found, _ = send(script)
    assert (found.error, found.output_tokens, found.tpot_s) == (None, None, None)
    assert doubt in found.doubt


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([(0.1, token())], "broken_off"),
        ([(0.1, token()), (0.1, httpx.ReadError("reset"))], "broken_off"),
        ([(0.1, token()), (0.1, httpx.RemoteProtocolError("peer closed"))], "broken_off"),
        ([(0.1, usage() + DONE)], "no_tokens"),
        ([(0.1, b"data: {nonsense\n\n")], "bad_stream"),
        ([(0.1, b"data: " + b"\x00\xff" * 100 + b"\n\n")], "bad_stream"),
        ([(0.1, event({"error": {"message": "no room"}}))], "error_in_stream"),
        ([(0.1, token())] * 50, "too_many_tokens"),
        ([(0.1, b": keep-alive\n\n" * 8000)] * 50, "too_many_tokens"),
        ([(0.1, httpx.ConnectError("refused"))], "refused"),
        ([(0.1, httpx.DecodingError("x"))], "other"),
    ],
)
def test_every_way_to_fail_has_its_kind_and_no_tokens(script, kind):
    found, _ = send(script)
    assert (found.error, found.output_tokens) == (kind, None)
    assert found.reason
    assert found.ended_s > 0


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind", "said"),
    [
        (429, {}, b'{"error": {"message": "slow down \\u001b[31m"}}', "http_4xx", "slow down"),
        (400, {}, b'{"detail": "too long"}', "http_4xx", "too long"),
        (503, {}, b"x" * 1_000_000, "http_5xx", "status 503"),
        (500, {}, b"", "http_5xx", "status 500"),
        (307, {"location": "http://192.0.2.1/"}, b"", "redirect", "not followed"),
        (200, {"content-type": "text/html"}, b"<html>", "not_a_stream", "text/html"),
        (200, {}, b"", "not_a_stream", "no content type"),
        (200, {**HEAD, "content-encoding": "gzip"}, b"", "not_a_stream", "compressed"),
    ],
)
def test_an_answer_that_is_no_stream_is_refused_in_its_own_words(status, headers, body, kind, said):
    found, _ = send([(0.1, body)], status=status, headers=headers)
    assert (found.error, found.status) == (kind, status)
    assert said in found.reason
    assert "\x1b" not in found.reason
    assert len(found.reason) < 400


def test_a_request_that_hangs_ends_at_its_deadline():
    async def hang(request):
        await asyncio.Event().wait()

    async def run():
        async with httpx.AsyncClient(transport=httpx.MockTransport(hang), base_url="http://x/") as client:
            return await sending.complete(client, sending.body("m", "x", 1, engine=False), within_s=0.05)

    found = asyncio.run(run())
    assert (found.error, found.reason) == ("timeout", "not done within 0.05 s")


def test_being_cancelled_is_no_timeout():
    async def hang(request):
        await asyncio.Event().wait()

    async def run():
        async with httpx.AsyncClient(transport=httpx.MockTransport(hang), base_url="http://x/") as client:
            task = asyncio.ensure_future(sending.complete(client, sending.body("m", "x", 1, engine=False), within_s=60))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())


class TestAddress:
    def test_the_base_of_all_requests(self):
        for url in ("http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1/"):
            assert server.place(url).base == "http://127.0.0.1:8000/"
        assert server.place("https://example.org/llm/v1").base == "https://example.org:443/llm/"
        assert server.place("http://[::1]:8000").base == "http://[::1]:8000/"
        assert server.place("http://[::1]:8000").loopback
        assert not server.place("http://192.0.2.1").loopback

    @pytest.mark.parametrize(
        "url",
        ["", "127.0.0.1:8000", "ftp://x", "http://", "http://u:p@x", "http://x?y=1", "http://x:99999", "http://x/#y"],
    )
    def test_what_is_no_address_is_refused(self, url):
        with pytest.raises(server.ServerError):
            server.place(url)

    def test_the_client_follows_nothing_and_asks_no_environment(self, monkeypatch):
        monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:1")
        made = server.client(server.place("http://127.0.0.1:1"), None, connections=1)
        assert (made.follow_redirects, made.trust_env) == (False, False)
        assert not made._mounts


class TestCounters:
    def test_vllm_counters_are_summed_over_engines_and_reasons(self):
        page = (
            'vllm:request_success_total{engine="0",finished_reason="length"} 3\n'
            'vllm:request_success_total{engine="1",finished_reason="stop"} 4\n'
            'vllm:time_to_first_token_seconds_sum{engine="0"} 1.5\n'
            'vllm:time_to_first_token_seconds_count{engine="0"} 3\n'
            'vllm:num_requests_running{engine="0"} 2\n'
        )
        found = server.read_counters(page)
        assert (found.framework, found.totals.requests, found.totals.first_token_sum_s) == ("vllm", 7, 1.5)
        assert found.totals.prompt_tokens is None
        assert found.metrics.running_requests == 2

    def test_sglang_counters(self):
        page = 'sglang:num_requests_total{model_name="m"} 5\nsglang:prompt_tokens_total{model_name="m"} 50.0\nsglang:token_usage 0.5\n'
        found = server.read_counters(page)
        assert (found.framework, found.totals.requests, found.totals.prompt_tokens) == ("sglang", 5, 50)

    @pytest.mark.parametrize("page", ["", "<html>", "http_requests_total 4\n", "x\0y"])
    def test_another_page_says_nothing(self, page):
        assert server.read_counters(page) == server.Counters()
