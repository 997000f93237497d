"""Calls of the commands for one model: compile, run, generate, serve, plan, simulate and demo."""

from __future__ import annotations

from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.cli.calls.call import BUILD, DEVICE, DISK, JSON, LANGUAGE_MODEL, PLANNED, CommandCall, Disk
from flashmem.cli.calls.file_inputs import FileInputs
from flashmem.request.description import OptionSet, argument, choice, option
from flashmem.request.kinds import File, Flag, Kind, Numeric, Several, Size
from flashmem.request.limits import Bytes
from flashmem.request.opening import CheckedSessionRequest, RunRequest, SessionRequest
from flashmem.request.request import BundleRequest, CompileCall


class CompileCommand(CompileCall, CommandCall):
    """Compile a model into a bundle, compile its kernels if the device is local, and print the bundle's path."""

    module = "flashmem.compile"

    within: str | None = option("", default=None, kind=Kind(), hidden=True)
    inspect: bool = option("Show what the open compiler of --device, an Adreno or Mali, makes of the kernels.", default=False)

    def run(self) -> None:
        """Compile, and print the path."""
        from flashmem.cli.commands.compiling import compile_here

        gpu = None
        if self.inspect:
            from flashmem.cli.commands.inspect_kernels import inspect_kernels, inspected_gpu

            gpu = inspected_gpu(self)
        made = compile_here(self)
        print(made.path)
        if gpu is not None:
            inspect_kernels(made, gpu)


class RunCommand(CheckedSessionRequest, FileInputs, CommandCall):
    """Run a model once (or --repeat times) and report latency and memory."""

    module = "flashmem.cli.commands.run"

    model: Path = argument("An .onnx model, or a bundle.", kw_only=False, kind=File("MODEL"))
    input: Path | None = option("Inputs by name; the rest is drawn from --seed.", default=None, kind=File("x.npz"))
    output: Path | None = option("Where to write the outputs.", default=None, kind=File("y.npz"))
    repeat: int = option("Runs in one session; the first one is reported.", default=1, kind=Numeric("N", least=1))
    verify: bool = option("Compare with ONNX Runtime; exit with 1 if they differ.", default=False)
    reference: Path | None = option(
        "The ONNX model of a bundle, for --verify.", default=None, kind=File("model.onnx"), flags=("--model",)
    )
    json: bool = option(JSON, default=False)
    learn: bool = option("Plan again with the times of these runs, and keep the plan in the bundle.", default=False)
    seed: int = option("Seed of the inputs not given.", default=0, kind=Numeric("N", least=0))
    trace: Path | None = option("Where to write layers and loads over time.", default=None, kind=File("trace.json"))
    timeline: Path | None = option(
        "A page with the runs over time, measured and predicted (needs the plots extra).", default=None, kind=File("out.html")
    )
    build: bool = option(BUILD, default=True, kind=Flag(no=""))

    @property
    def traced(self) -> bool:
        """Whether the session records when each launch ran."""
        return self.trace is not None or self.timeline is not None or self.learn

    def run(self) -> None:
        """Run it."""
        from flashmem.cli.commands.run import run_model

        run_model(self)


class GenerateCommand(SessionRequest, CommandCall):
    """Answer a prompt with a language model, and print the text as it is generated."""

    module = "flashmem.cli.commands.generate"

    model: Path = argument(LANGUAGE_MODEL, kw_only=False, kind=File("MODEL"))
    prompt: str | None = argument(
        "What to answer; none: each line of stdin, in one conversation.", kw_only=False, default=None, kind=Kind("PROMPT")
    )
    plain: bool = option("Continue the prompt as a text, without a chat template.", default=False)
    system: str | None = option("The system's message before a conversation.", default=None, kind=Kind())
    max_new_tokens: int = option("The most tokens of an answer.", default=256, kind=Numeric("N", least=1))
    temperature: float = option("0 takes the likeliest token.", default=0.0, kind=Numeric("N", float, least=0))
    top_k: int = option("Sample among so many likeliest tokens; 0: all.", default=0, kind=Numeric("N", least=0))
    top_p: float = option(
        "Sample among the likeliest tokens of this probability.", default=1.0, kind=Numeric("N", float, most=1)
    )
    repetition_penalty: float = option("Above 1: avoid tokens that occurred.", default=1.0)
    seed: int | None = option("Equal seeds sample equally.", default=None, kind=Numeric("N", least=0))
    stop: tuple[str, ...] = option("End before this text; repeatable.", default=(), kind=Several())
    template_argument: tuple[str, ...] = option(
        "A name for the chat template, for instance enable_thinking=false; repeatable.", default=(),
        kind=Several(of=Kind("NAME=VALUE")),
    )  # fmt: skip
    conversation: Path | None = option(
        "Go on with this conversation if it exists, and save it.", default=None, kind=File("chat.npz")
    )
    speculate: bool = option("Check drafts from the text so far, where that is faster.", default=True, kind=Flag(no=""))
    chat: bool = option("After the prompt, answer each line of stdin in the same conversation.", default=False)
    draft: Path | None = option(
        "A small model with the same tokens, whose drafts are checked.", default=None, kind=File("MODEL")
    )
    estimate: bool = option("Say memory, speed and smallest budget, before any weight is read.", default=False)
    json: bool = option(JSON, default=False)

    def run(self) -> None:
        """Answer, or estimate what that takes."""
        if self.estimate:
            from flashmem.cli.commands.estimate import show_estimate

            show_estimate(self.model, self.of_bundle, as_json=self.json)
            return
        from flashmem.cli.commands.generate import generate_text

        generate_text(self)


class ServeCommand(SessionRequest, CommandCall):
    """Serve a language model by HTTP, with the interface of OpenAI's API."""

    module = "flashmem.cli.commands.serve"

    model: Path = argument(LANGUAGE_MODEL, kw_only=False, kind=File("MODEL"))
    host: str = option("The address to listen at; 0.0.0.0 for other machines too.", default="127.0.0.1")
    port: int = option("The port; 0 for any free one.", default=8000, kind=Numeric("N", least=0, most=65535))
    name: str | None = option("The model's name for clients.", default=None, kind=Kind(), shown="that of the file")

    def run(self) -> None:
        """Serve until the process is interrupted."""
        from flashmem.cli.commands.serve import serve_model

        serve_model(self)


class PlanCommand(BundleRequest, CommandCall):
    """Show the overlap plan of a bundle, of a model compiled with these options, or of a known architecture, and check it."""

    module = "flashmem.cli.commands.plan"

    model: Path = argument(PLANNED, kw_only=False, kind=File("MODEL"))
    json: bool = option(JSON, default=False)
    show_all: bool = option("Every layer and slice, however many.", default=False, flags=("--all",))

    def run(self) -> None:
        """Show it."""
        from flashmem.cli.commands.plan import show_plan

        show_plan(self.model, self.given_as(BundleRequest), as_json=self.json, show_all=self.show_all)


class SimulateCommand(RunRequest, CommandCall):
    """Predict latency and memory of a plan on a device from its descriptor; the device need not be present."""

    module = "flashmem.cli.commands.simulate"

    model: Path = argument(PLANNED, kw_only=False, kind=File("MODEL"))
    disk: Disk = option(DISK, default="cached", kind=choice(Disk))
    timeline: Path | None = option("Page of work and memory over time (plots extra).", default=None, kind=File("out.html"))
    json: bool = option(JSON, default=False)

    def run(self) -> None:
        """Print the prediction."""
        from flashmem.cli.commands.simulate import simulate_model

        simulate_model(self)


class DemoCommand(OptionSet, CommandCall):
    """Read the text in an image with two trained networks, or answer a prompt with a language model, in a memory budget."""

    module = "flashmem.cli.demo.run"

    image: Path | None = argument(
        "An image to read; default: a generated page.", kw_only=False, default=None, kind=File("IMAGE|generate")
    )
    prompt: str | None = argument(
        "What the language model of `demo generate` answers.", kw_only=False, default=None, kind=Kind("PROMPT")
    )
    budget: Bytes = option("Memory limit of a network.", default=None, kind=Size(), shown="50MB; generate: 60MB")
    device: str = option(DEVICE, default="auto", kind=Kind("NAME"))

    def run(self) -> None:
        """Run the demo."""
        from flashmem.cli.demo import chat, run

        if self.image == Path("generate"):
            chat.run_demo(self.prompt, budget=self.budget, device=self.device)
        elif self.prompt is not None:
            raise UserError(f"{self.prompt!r} follows an image; only `flashmem demo generate` takes a prompt")
        else:
            run.run_demo(self.image, budget=self.budget, device=self.device)
