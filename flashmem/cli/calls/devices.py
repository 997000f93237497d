"""Calls of the commands that examine devices or explore many models: devices, doctor, profile, tune, design, sweep and zoo."""

from __future__ import annotations

from pathlib import Path

from flashmem.base.errors import UserError
from flashmem.cli.calls.call import DEVICE, JSON, SHAPE, CommandCall, Disk
from flashmem.request.description import OptionSet, argument, choice, option
from flashmem.request.kinds import File, Flag, Kind, Numeric, Several
from flashmem.schedule.objectives import AUTO


class DevicesCommand(OptionSet, CommandCall):
    """Show the devices of this machine, the memory path and transfer mode of each, and why other modes do not work."""

    module = "flashmem.cli.commands.devices"

    measure: bool = option(
        "First measure devices whose rates are another processor's, in seconds.", default=True, kind=Flag(no="")
    )
    json: bool = option(JSON, default=False)

    def run(self) -> None:
        """Show them."""
        from flashmem.cli.commands.devices import measure_devices, show_devices

        if self.measure:
            measure_devices()
        show_devices(as_json=self.json)


class DoctorCommand(OptionSet, CommandCall):
    """Check OpenCL from the linker up, name the command that repairs a failure, and test each device for two seconds.

    Exits with 1 unless one device passes every test.
    """

    module = "flashmem.cli.commands.doctor"

    json: bool = option(JSON, default=False)

    def run(self) -> int:
        """Examine this machine; 1 unless a device passes."""
        from flashmem.cli.commands.doctor import examine

        return 0 if examine(as_json=self.json) else 1


class ProfileCommand(OptionSet, CommandCall):
    """Measure a device, train its capacity model, and print the path of the descriptor written."""

    module = "flashmem.cli.commands.profile"

    device: str = option(DEVICE, default="auto", kind=Kind("NAME"))
    minutes: float = option("Minutes to measure, over all resumed calls.", default=15.0, kind=Numeric("N", float, least=0.1))
    output: Path = option(
        "Folder for the descriptor, the model and the dataset.", default=Path(), kind=File("DIR"), flags=("-o", "--output")
    )
    name: str = option("Name of the files.", default="", shown="the descriptor's")
    model: tuple[Path, ...] = option(
        "Measure this model's launches too; repeatable.", default=(), kind=Several("model.onnx", File())
    )
    resume: bool = option("Continue an interrupted profile, or start again.", default=True, kind=Flag(no="--fresh"))
    seed: int = option("Seed for drawing kernels.", default=0, kind=Numeric("N", least=0))
    kit: Path | None = option(
        "Measure nothing: write a kit for measuring --device on another machine.", default=None, kind=File("x.kit")
    )
    measure: Path | None = option(
        "Measure with a kit, without the compiler, and write the dataset only.", default=None, kind=File("x.kit")
    )
    dataset: Path | None = option(
        "Measure nothing: train on this dataset, or on a phone kit's JSON.", default=None, kind=File("x.profile.csv.gz")
    )
    without: tuple[str, ...] = option(
        "With --dataset: keep this model's launches out of training; repeatable.", default=(), kind=Several("NAME")
    )
    report: bool = option("With --dataset: evaluate predictions, train nothing.", default=False)
    figures: Path | None = option("With --report: draw figures into this folder.", default=None, kind=File("DIR"))
    again: Path | None = option(
        "With --report: another profile of the device, to compare with.", default=None, kind=File("x.profile.csv.gz")
    )

    def check(self) -> None:
        """Raise UserError for steps that do not go together."""
        if (self.report and self.dataset is None) or (not self.report and (self.figures or self.again)):
            raise UserError(
                "--report needs --dataset; --figures and --again need --report; name the dataset that a profile wrote"
            )
        if sum(each is not None for each in (self.kit, self.measure, self.dataset)) > 1:
            raise UserError("--kit, --measure and --dataset are three steps; name one of them")
        if self.without and (self.report or self.dataset is None):
            raise UserError("--without needs --dataset, and does not go with --report: it says what training leaves out")

    def run(self) -> None:
        """Do the step that is named, or all of them."""
        from flashmem.cli.commands import profile

        if self.kit is not None:
            print(profile.write_kit(self, self.kit))
        elif self.measure is not None:
            print(profile.measure_device(self, self.measure))
        elif self.report and self.dataset is not None:
            profile.report_on(self.dataset, self.figures, self.again)
        elif self.dataset is not None:
            print(profile.retrain_model(self.dataset, self.without))
        else:
            print(profile.profile_device(self))


class TuneCommand(OptionSet, CommandCall):
    """Measure a device's kernel configs, most useful workloads first, and print the path of the descriptor to compile with."""

    module = "flashmem.cli.commands.tune"

    device: str = option(DEVICE, default="auto", kind=Kind("NAME"))
    minutes: float = option("Minutes to measure, in this call.", default=4.0, kind=Numeric("N", float, least=0.05))
    family: tuple[str, ...] = option(
        "Only kernels of this family: matmul, conv, matmul_dynamic, attention; repeatable.", default=(), kind=Several("NAME")
    )
    output: Path | None = option(
        "Folder for the tuning database and its descriptor.",
        default=None,
        kind=File("DIR"),
        flags=("-o", "--output"),
        shown="next to a descriptor in a file, else here",
    )
    resume: bool = option("Measure missing configs, or start again.", default=True, kind=Flag(no="--fresh"))

    def run(self) -> None:
        """Measure, and print the path."""
        from flashmem.cli.commands.tune import tune_device

        print(tune_device(self))


class DesignCommand(OptionSet, CommandCall):
    """Choose models, devices and budgets for an application's objectives, and the alternatives when a processor or memory is
    occupied.
    """

    module = "flashmem.cli.commands.design"

    application: Path = argument("Tasks, models, objectives.", kw_only=False, kind=File("app.toml"))
    output: Path | None = option(
        "Folder for the designs' bundles and design.json.", default=None, kind=File("DIR"), flags=("-o", "--output")
    )
    runs: int = option("Measured answers of each candidate, after the first.", default=20, kind=Numeric("N", least=2))
    simulated: bool = option("Predict candidates from descriptors; measure nothing.", default=False, flags=("--simulate",))
    seed: int = option("Seed of the inputs.", default=0, kind=Numeric("N", least=0))
    json: bool = option(JSON, default=False)

    def run(self) -> None:
        """Design the application."""
        from flashmem.cli.commands.design import design_application

        design_application(self)


class SweepCommand(OptionSet, CommandCall):
    """Plan, and simulate or measure, a grid of limits and parameters over models and devices; resumable."""

    module = "flashmem.cli.commands.sweep"

    models: tuple[Path, ...] = argument(".onnx models, bundles, or zoo:NAME.", kw_only=False, kind=Several("MODEL", File()))
    output: Path = option(
        "Results file; rows are added as they finish.",
        default=Path("sweep.csv"),
        kind=File("sweep.csv"),
        flags=("-o", "--output"),
    )
    plot: Path | None = option(
        "Plot of latency against memory; a second one shows preloading.", default=None, kind=File("sweep.png")
    )
    m_peak: str | None = option("Limits on weights in flight.", default=None, kind=Kind("SIZE,..."))
    budget: str | None = option("Limits on all memory.", default=None, kind=Kind("SIZE,..."))
    lambda_: str | None = option(
        "Latency (0) against memory (1).", default=None, kind=Kind("NUMBER,..."), shown="0; paper: 0.9"
    )
    mu: str = option("Weights of loading distance in adaptive unfusion.", default="0.1", kind=Kind("NUMBER,..."))
    precision: str = option("As of flashmem compile: fp32, fp16, tf32.", default="fp32", kind=Kind("NAME,..."))
    device: str = option("Local devices, descriptors, or 'auto'.", default="auto", kind=Kind("NAME,..."))
    chunk: str = option("Unit of transfer (S).", default="auto", kind=Kind("SIZE"))
    shape: tuple[str, ...] = option(SHAPE, default=(), kind=Several("NAME=1x128"))
    objective: str = option(
        "The first answer (auto), later runs, or the paper's sum.", default=AUTO, kind=Kind("NAME,..."), shown="auto"
    )
    mode: str = option("How weights are transferred.", default="auto", kind=Kind("NAME,..."))
    vary: tuple[str, ...] = option(
        "Values of a further option of flashmem plan; repeatable, for instance strategy=stream,same-op.",
        default=(),
        kind=Several("NAME=VALUE,..."),
    )
    paper: bool = option(
        "The paper's reading where an option is not given: its objective as printed, interleaved moves, unfusion, CP-SAT.",
        default=False,
        kind=Flag(no=""),
    )
    disk: Disk = option("Whether the weight file is in the page cache; plans expect cold.", default="cold", kind=choice(Disk))
    measured: bool = option("Run every point, or predict it.", default=False, kind=Flag(no="--simulated"))
    runs: int = option(
        "Fresh processes for each measured point; the result is their median.", default=3, kind=Numeric("N", least=1)
    )
    jobs: int | None = option("Processes that simulate.", default=None, kind=Numeric("N", least=1), shown="half the cores")

    def run(self) -> None:
        """Compute the points that the file lacks."""
        from flashmem.cli.commands.sweep import sweep

        sweep(self)


class ListZooCommand(OptionSet, CommandCall):
    """List the models and the default input size of each."""

    module = "flashmem.cli.commands.zoo"

    def run(self) -> None:
        """List them."""
        from flashmem.cli.commands.zoo import list_models

        list_models()


class ExportZooCommand(OptionSet, CommandCall):
    """Write one of the models with random weights, and print the file's path.

    Writes inputs.npz, an example of every input for `flashmem run --input`, beside it.
    """

    module = "flashmem.cli.commands.zoo"

    name: str = argument("A model, as `zoo list` names it.", kw_only=False, kind=Kind("NAME"))
    output: Path = option("Where model.onnx is written.", kind=File("DIR"), flags=("-o", "--output"))
    size: int | None = option(
        "Of its input, in the unit of `zoo list`.", default=None, kind=Numeric("N", least=1), shown="its own"
    )
    seed: int = option("Seed of the weights.", default=0, kind=Numeric("N", least=0))

    def run(self) -> None:
        """Export, and print the path."""
        from flashmem.cli.commands.zoo import export_model

        print(export_model(self))
