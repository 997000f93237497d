"""The server's application with generators that compute nothing: what it refuses, and what it does for clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from flashmem.base.errors import RunError, UserError
from flashmem.runtime.generation.generated_text import GenerationReport, Piece
from flashmem.tools.server import app, clients
from flashmem.tools.server.app import application, http_server, listening
from flashmem.tools.server.one_by_one import OneByOne
from flashmem.tools.server.protocol import read_request

REPORT = GenerationReport(1, 0, 2, 0, 0, 0, 0, 0, 0, True)
WAIT = 20  # seconds until a test has failed


class Made:
    """A text of a fake generator."""

    report = REPORT

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close


class Fake:
    """A generator of one text at a time, each of `pieces`, which wait for `hold`."""

    language, rows = SimpleNamespace(sampling={}), 1

    def __init__(self, error: Exception | None = None, pieces: int = 2) -> None:
        self.error, self.pieces, self.made, self.row = error, pieces, 0, threading.Lock()
        self.hold, self.tokens_hold = threading.Event(), threading.Event()
        self.hold.set()
        self.tokens_hold.set()

    def tokens_of(self, prompt: Any, template_arguments: Any = None) -> list[int]:
        assert self.tokens_hold.wait(WAIT)
        return [1]

    def generate(self, tokens: list[int], *, deliver: Callable[[Piece], None], **options: Any) -> Made:
        closed = threading.Event()

        def work() -> None:
            with self.row:
                if closed.is_set():
                    return
                self.made += 1
                for _ in range(self.pieces):
                    assert self.hold.wait(WAIT)
                    if closed.is_set():
                        break
                    deliver("é")
                deliver(self.error)

        threading.Thread(target=work).start()
        return Made(closed.set)


class Refusing(Fake):
    """A generator that begins no text."""

    def generate(self, tokens: list[int], **options: Any) -> Made:
        assert self.error is not None
        raise self.error


class Held(Fake):
    """A generator whose texts are delivered from outside; `left`: those that were ended."""

    def __init__(self) -> None:
        super().__init__()
        self.delivers: list[Callable[[Piece], None]] = []
        self.left: list[int] = []

    def generate(self, tokens: list[int], *, deliver: Callable[[Piece], None], **options: Any) -> Made:
        number = len(self.delivers)
        self.delivers.append(deliver)
        return Made(lambda: self.left.append(number))


class Asked:
    """A request to an application, and the response."""

    def __init__(self, made: Any, body: Any = None, path: str = "/v1/completions", address: str = "127.0.0.1", **fields: str):
        self._parts = [json.dumps(body).encode() if isinstance(body, dict) else body or b""]
        given = {"host": "localhost:8000", "content-type": "application/json"} | {
            name.replace("_", "-"): value for name, value in fields.items()
        }
        self._scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET" if body is None else "POST",
            "path": path, "raw_path": path.encode(), "query_string": b"", "scheme": "http", "server": None, "client": None,
            "root_path": "", "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        }  # fmt: skip
        self.left, self.got, self.status = asyncio.Event(), b"", 0
        self.some = asyncio.Event()  # a part of the body was sent
        self.task = asyncio.ensure_future(made(self._scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.got += message.get("body", b"")
        if message.get("body"):
            self.some.set()

    async def answer(self) -> tuple[int, Any]:
        """The status and the JSON of the response."""
        await asyncio.wait_for(self.task, WAIT)
        return self.status, json.loads(self.got) if self.got.startswith(b"{") else self.got.decode()


def served(generator: Any, address: str = "127.0.0.1") -> Any:
    """The application."""
    return application(generator, "m", address)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 2 * WAIT))


def test_pages_that_are_refused() -> None:
    own = {"host": "localhost:8000", "origin": "http://localhost:8000"}
    cases: list[tuple[int, dict[str, str]]] = [
        (200, {}), (200, own), (200, {"sec_fetch_site": "same-origin", "origin": "https://proxy.example"}),
        (200, {"sec_fetch_site": "none"}), (200, {"host": "127.0.0.1"}), (200, {"host": "[::1]:8000"}),
        (200, {"host": "LOCALHOST"}),
        (200, {"content_type": "Application/JSON; charset=utf-8"}),
        (403, {"origin": "https://evil.example"}), (403, {"origin": "null"}), (403, {"origin": "http://localhost:3000"}),
        (403, {"sec_fetch_site": "cross-site"}), (403, {**own, "sec_fetch_site": "same-site"}),
        (400, {"host": "evil.example"}), (400, {"host": ""}), (400, {"host": "evil@127.0.0.1"}),
        (400, {"host": "127.0.0.1.evil.example"}),
        (415, {"content_type": "text/plain"}), (415, {"content_type": ""}),
        (415, {"content_type": "text/plain;application/json"}),
    ]  # fmt: skip

    async def test() -> None:
        fake = Fake()
        for status, fields in cases:
            made = fake.made
            found, content = await Asked(served(fake, "::1"), {"prompt": "a"}, **fields).answer()
            assert (found, fake.made - made) == (status, int(status == 200)), (fields, content)
            assert status == 200 or content["error"]["type"] == "invalid_request_error"
        for address, status in (("127.0.0.2", 400), ("0.0.0.0", 200), ("::", 200)):
            found, _ = await Asked(served(fake, address), path="/v1/models", host="a.example").answer()
            assert found == status
        found, _ = await Asked(served(fake, "127.0.0.2"), path="/v1/models", host="127.0.0.2:80").answer()
        assert found == 200

    run(test())


def test_numbers_that_are_out_of_range() -> None:
    for name in ("max_tokens", "temperature", "top_p", "seed"):
        for value in (10**400, -(10**400), float("nan"), float("inf"), 2**63):
            with pytest.raises(UserError) as caught:
                read_request({"prompt": "a", name: value}, chat=False, model="m")
            assert str(caught.value).startswith(f"{name} ") and len(str(caught.value)) < 160


def test_stop_texts_that_are_too_many_or_too_long() -> None:
    assert read_request({"prompt": "a", "stop": ["x" * 1000] * 4}, chat=False, model="m").stop == ("x" * 1000,) * 4
    for stop in (["x"] * 5, "x" * 1001):
        with pytest.raises(UserError, match="stop has more than 4 texts, or one of more than 1000 characters"):
            read_request({"prompt": "a", "stop": stop}, chat=False, model="m")


def test_failures_say_nothing_about_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        errors = RunError("short read: /a/b/weights.bin"), UserError("/a/b is damaged"), OSError(5, "no", "/a/b")
        for error in errors:
            for stream in (False, True):
                for fake in (Refusing(error), Fake(error)):
                    asked = Asked(served(fake), {"prompt": "a", "stream": stream})
                    status, _ = await asked.answer()
                    assert status == (200 if stream else 500)
                    assert b"the server could not answer; its own output says why" in asked.got and b"/a/b" not in asked.got
                    assert b'"type": "server_error"' in asked.got.replace(b'":"', b'": "')
                    assert "/a/b" in capsys.readouterr().err

    run(test())


def test_others_are_answered_while_tokens_are_found() -> None:
    async def test() -> None:
        fake = Fake()
        fake.tokens_hold.clear()
        made = served(fake)
        slow = Asked(made, {"prompt": "a"})
        assert (await Asked(made, path="/v1/models").answer())[0] == 200
        assert not slow.task.done()
        fake.tokens_hold.set()
        assert (await slow.answer())[0] == 200

    run(test())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_ends_its_text(stream: bool) -> None:
    async def test() -> None:
        fake = Fake(pieces=10**9)
        made = served(fake)
        first, second, third = (Asked(made, {"prompt": "a", "stream": stream}) for _ in range(3))
        if stream:
            await asyncio.wait_for(first.some.wait(), WAIT)
        while not fake.made:
            await asyncio.sleep(0)
        second.left.set()
        await asyncio.wait_for(second.task, WAIT)
        fake.pieces = 2
        first.left.set()
        await asyncio.wait_for(first.task, WAIT)
        assert (await third.answer())[0] == 200 and fake.made == 2  # of the first and the third

    run(test())


def test_a_stream_goes_on_beside_many_clients_that_wait_and_leave() -> None:
    """Waiting holds no thread, of which there are few."""

    async def test() -> None:
        batch = Held()
        made = served(batch)
        asked = [Asked(made, {"prompt": "a", "stream": True}) for _ in range(60)]
        while len(batch.delivers) < 60:
            await asyncio.sleep(0)
        for piece in ("One", " two"):
            asked[0].some.clear()
            threading.Thread(target=batch.delivers[0], args=(piece,)).start()
            await asyncio.wait_for(asked[0].some.wait(), WAIT)
        for each in asked[1:]:
            each.left.set()
        await asyncio.wait_for(asyncio.gather(*(each.task for each in asked[1:])), WAIT)
        assert sorted(batch.left) == [*range(1, 60)]
        batch.delivers[0](None)
        assert "[DONE]" in (await asked[0].answer())[1] and asked[0].got.count(b'"finish_reason": null') == 2

    run(test())


def test_more_requests_than_the_server_takes() -> None:
    async def test() -> None:
        fake = Fake()
        fake.hold.clear()
        made = served(fake)
        waiting = [Asked(made, {"prompt": "a"}) for _ in range(app.MOST_WAITING + 1)]
        await asyncio.sleep(0)
        status, content = await Asked(made, {"prompt": "a"}).answer()
        assert status == 429 and content["error"]["message"] == "the server has 65 requests already; ask again later"
        waiting[9].left.set()
        await asyncio.wait_for(waiting.pop(9).task, WAIT)
        waiting.append(Asked(made, {"prompt": "a"}))
        fake.hold.set()
        assert {(await each.answer())[0] for each in waiting} == {200}

    run(test())


def test_bodies_that_are_too_long_or_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MOST_BYTES", 100)

    async def test() -> None:
        made = served(Fake())
        status, content = await Asked(made, b" " * 101).answer()
        assert status == 400 and content["error"]["message"] == "the body has more than 100 bytes"
        monkeypatch.setattr(clients, "MOST_SECONDS", 0.01)
        slow = Asked(made, b" ")
        slow._parts.clear()
        status, content = await slow.answer()
        assert status == 400 and content["error"]["message"] == "the body took more than 0.01 s"

    run(test())


def test_work_that_is_taken_back_and_work_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        work, hold, done = OneByOne("test"), threading.Event(), list[int]()
        first, second = work.begin(lambda: hold.wait(WAIT)), work.begin(lambda: done.append(2))
        third, fourth = work.begin(lambda: 1 // 0), work.begin(lambda: done.append(4))
        second.cancel()
        await asyncio.sleep(0)
        assert len(work._waiting) == 2
        hold.set()
        await asyncio.wait_for(fourth, WAIT)
        assert first.result() and isinstance(third.exception(), ZeroDivisionError) and done == [4]

        def refuse(*given: Any) -> None:
            raise RuntimeError("can't start new thread")

        loop = asyncio.get_running_loop()
        with monkeypatch.context() as patch:
            patch.setattr(loop, "run_in_executor", refuse)
            assert isinstance(work.begin(lambda: 1).exception(), RuntimeError)
        assert await work.begin(lambda: 1) == 1

    run(test())


def test_more_connections_than_the_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MOST_CONNECTIONS", 3)
    with listening("::1", 0) as at:
        generator: Any = Fake()
        server = http_server(generator, "m", "::1")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [at]})
        thread.start()
        try:
            for silent, status in ((0, b"200"), (2, b"503")):
                with ExitStack() as opened:
                    for _ in range(silent):
                        opened.enter_context(socket.create_connection(at.getsockname()[:2], WAIT))
                    asked = opened.enter_context(socket.create_connection(at.getsockname()[:2], WAIT))
                    asked.sendall(b"GET /v1/models HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n\r\n")
                    assert asked.recv(12) == b"HTTP/1.1 " + status
        finally:
            server.should_exit = True
            thread.join(WAIT)
