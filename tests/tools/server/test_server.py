"""`flashmem serve` beside the client of OpenAI's API, with a small model; its texts beside those of a generator."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import flashmem
from flashmem.tools.server.protocol import UnknownModelError, read_request
from tests.support.gguf_models import SmallLlama


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    file = SmallLlama(layers=1, formats=("Q4_0",)).write(folder / "small.gguf")
    return flashmem.compile(file, folder / "small.flashmem", max_length=160).path


@pytest.fixture(scope="module", params=[1, 3], ids=["one at a time", "batch"])
def address(request: pytest.FixtureRequest, bundle: Path) -> Iterator[str]:
    """The address of a server in a process of its own, which is interrupted at the end as by Ctrl-C.

    Until then the process stays below its limit: for one request at a time the limit that a refusal names.
    """
    served, options = (str(bundle), ()) if request.param == 1 else (str(bundle.with_suffix(".gguf")), BATCH)
    command = [sys.executable, "-m", "flashmem", "serve", served, "--port", "0", *options, "--process-memory"]
    limit = 400
    if request.param == 1:
        refused = subprocess.run([*command, "60MB"], capture_output=True, text=True, check=False)
        found = re.search(r"is too small: the process holds .* give (\d+)MB or more$", refused.stderr.strip())
        assert refused.returncode == 2 and found is not None, refused.stderr
        limit = int(found[1]) + 1  # processes differ by some hundred KB
    command.append(f"{limit}MB")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.readline()
    while said.startswith("flashmem: compiling"):
        said = process.stderr.readline()
    assert "small is served at http://127.0.0.1:" in said, said
    yield said.split()[-1]
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    peak = re.search(r"VmHWM:\s*(\d+) kB", status)
    assert peak is not None and int(peak[1]) * 1024 <= limit * 1_000_000
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(timeout=30) in (0, 130) and "Traceback" not in rest, rest


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def generator(bundle: Path) -> Iterator[flashmem.Generator]:
    with flashmem.Generator(bundle) as made:
        yield made


BATCH = ("--batch", "3", "--max-length", "160")

ASKED: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How fast is it?"}]


def test_the_model(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "small" and client.models.retrieve("small").owned_by == "flashmem"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here"):
        client.models.retrieve("other")


def test_a_conversation(client: openai.OpenAI, generator: flashmem.Generator) -> None:
    wanted = "".join(generator.generate(ASKED, max_new_tokens=20))
    given: Any = {"model": "small", "messages": ASKED, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**given)
    [choice] = whole.choices
    assert choice.message.content == wanted and choice.message.role == "assistant"
    assert generator.last is not None and whole.usage is not None
    assert choice.finish_reason == ("stop" if generator.last.ended else "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (generator.last.prompt, generator.last.tokens)
    events = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    *pieces, last = events
    assert "".join(event.choices[0].delta.content or "" for event in pieces) == wanted and len(pieces) > 3
    assert pieces[0].choices[0].delta.role == "assistant" and pieces[-1].choices[0].finish_reason == choice.finish_reason
    assert last.usage == whole.usage and {event.id for event in events} == {last.id}


def test_parts_of_a_message_and_names_of_roles(client: openai.OpenAI) -> None:
    parts: list[Any] = [{"type": "text", "text": "How fast"}, {"type": "text", "text": " is it?"}]
    named: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    texts = {
        client.chat.completions.create(model="small", messages=each, max_completion_tokens=8, temperature=0)
        .choices[0]
        .message.content
        for each in (named, ASKED)
    }
    assert len(texts) == 1


def test_a_text(client: openai.OpenAI, generator: flashmem.Generator) -> None:
    wanted = "".join(generator.generate("A decoder reads", max_new_tokens=16))
    tokens = generator.tokens_of("A decoder reads")
    prompts: list[Any] = ["A decoder reads", tokens, ["A decoder reads"], [tokens]]
    for prompt in prompts:
        found = client.completions.create(model="small", prompt=prompt, temperature=0)
        assert found.choices[0].text == wanted  # 16 tokens, as the API says
    streamed = client.completions.create(model="small", prompt=tokens, temperature=0, stream=True)
    assert "".join(event.choices[0].text for event in streamed) == wanted
    stop = wanted[3:6]
    cut = client.completions.create(model="small", prompt=tokens, temperature=0, stop=[stop, "\x00never"])
    assert cut.choices[0].text == wanted[: wanted.index(stop)] and cut.choices[0].finish_reason == "stop"


def test_seeds(client: openai.OpenAI) -> None:
    given: Any = {"model": "small", "prompt": "A decoder", "temperature": 2.0, "top_p": 0.99}
    texts = [client.completions.create(**given, seed=seed).choices[0].text for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1] and len(set(texts)) > 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"n": 2}, "n is not supported; leave it out"),
        ({"tools": [{"type": "function"}]}, "tools is not supported; leave it out"),
        ({"temperature": -1}, "temperature -1 is not possible; give a number that is 0 or more"),
        ({"temperature": "warm"}, "temperature 'warm' is no number"),
        ({"max_tokens": 1.5}, "max_tokens 1.5 is no whole number"),
        ({"stop": [1]}, "stop is neither a text nor a list of texts"),
        ({"stream": "yes"}, "stream 'yes' is neither true nor false"),
        ({"messages": []}, "the prompt is empty; give at least one word"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "the content of a message is no text"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "the last message of a conversation must be the user's"),
        ({"messages": [{"role": "user", "content": "word " * 400}]}, "and the cache holds 160; shorten the prompt"),
    ],
)
def test_bad_requests(changed: dict[str, Any], said: str, client: openai.OpenAI) -> None:
    given = {"model": "small", "messages": ASKED, "max_tokens": 4} | changed
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**given)  # type: ignore[call-overload]
    assert said in str(caught.value)


def test_bodies_that_are_no_requests(address: str) -> None:
    for body, said in ((b"{", "the body is no JSON"), (b"[1]", "the body is no JSON object"), (b"[" * 9999, "is no JSON")):
        with pytest.raises(urllib.error.HTTPError) as caught:
            asked = urllib.request.Request(f"{address}/completions", body, {"Content-Type": "application/json"})
            urllib.request.urlopen(asked, timeout=30)
        assert caught.value.code == 400 and said in json.loads(caught.value.read())["error"]["message"]
    with pytest.raises(UnknownModelError):
        read_request({"model": "other", "prompt": "x"}, chat=False, model="small")


def test_a_page_of_another_host_is_refused(address: str) -> None:
    asked = urllib.request.Request(f"{address}/models", headers={"Host": "example.org"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(asked, timeout=30)
    assert caught.value.code == 400


def test_requests_wait_for_their_turn_and_a_client_may_leave(client: openai.OpenAI, generator: flashmem.Generator) -> None:
    """A stream that its client closes ends, and those that wait get the texts that they would get alone."""
    left = client.completions.create(model="small", prompt="A decoder", max_tokens=140, temperature=0, stream=True)
    next(iter(left))
    left.close()
    prompts, found = ["The naïve way", "They'll say", "reads all again", "costs 1,024"], dict[str, str]()

    def ask(prompt: str) -> None:
        found[prompt] = client.completions.create(model="small", prompt=prompt, temperature=0).choices[0].text

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {prompt: "".join(generator.generate(prompt, max_new_tokens=16)) for prompt in prompts}


def test_a_port_that_is_taken(address: str, bundle: Path) -> None:
    port = address.split(":")[2].split("/")[0]
    done = subprocess.run(
        [sys.executable, "-m", "flashmem", "serve", str(bundle), "--port", port], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and f"port {port} of 127.0.0.1 cannot be used" in done.stderr and done.stderr.count("\n") == 1
