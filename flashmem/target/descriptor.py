"""Device descriptor: the properties of a device for the compiler and the planner, as data (devices/*.toml).

It lists a device's memory paths and transfer modes, the configs of its kernels, its limits and its rates. `measured` says
measured rates from published figures, `measured_on` names the processor, and `sources` the source of each rate.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from flashmem.base.errors import MissingFileError, UserError
from flashmem.base.pages import LARGEST_PAGE, is_page_size
from flashmem.base.resources import names, read_text
from flashmem.base.tables import build
from flashmem.base.types import DEFAULT_PAGE, MemoryPath, TransferMode
from flashmem.target.instruction_set import INSTRUCTION_SETS, PANEL, InstructionSet
from flashmem.target.pipelines import Pipelines
from flashmem.target.registers import RegisterFile

MOST_LOADER_THREADS = 64
"""The most loader threads that a descriptor or a bundle may have."""


@dataclass(frozen=True)
class PlainTile:
    """The plain tile: outputs of one work-item, up to `rows` rows of `columns` channels, in vectors of `vector` floats.

    `panel` is the width of a packed panel, of which a wider tile reads several; 0: that of the tile. `local_size` is the
    work-group (columns first). `lanes` work-items share one row of a reduction (1 on CPUs, where a work-item is a thread's
    vector loop). A CPU's tile follows from its instruction set unless it is stated.
    """

    rows: int = INSTRUCTION_SETS["avx2"].rows
    columns: int = PANEL
    vector: int = PANEL
    local_size: tuple[int, int] = (1, 1)
    lanes: int = 1
    panel: int = 0


def cpu_tile(instructions: InstructionSet) -> PlainTile:
    """The plain tile of a CPU."""
    return PlainTile(instructions.rows, PANEL * instructions.panels, PANEL, panel=PANEL)


Feature = Literal["half", "shuffle", "mma"]
"""What kernels of a config need from a driver.

Arithmetic in half, shuffles of registers in a subgroup, or products of small matrices by a subgroup.
"""

_FOLLOWS_TILE = "winograd"
"""The kind of config whose tile on a CPU follows from the registers, like the plain one."""


@dataclass(frozen=True)
class ConfigTable:
    """A kernel config as a descriptor lists it: its kind, and its other keys. Only the compiler knows what they mean
    (`compiler.configs.kinds`).
    """

    kind: str
    values: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> ConfigTable:
        """The config of a table of a file, lists as tuples."""
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
        return cls(str(values.pop("kind", None)), tuple(values.items()))

    def to_dict(self) -> dict[str, Any]:
        """The table that `of` reads."""
        return {"kind": self.kind, **dict(self.values)}


MultiplyAdd = Literal["fma", "mad", "expression"]
"""How kernels multiply and add: by the built-in `fma`, rounded once, by `mad`, rounded as the device does it fastest, or by
`x * y + z`, rounded twice."""


@dataclass(frozen=True)
class CodeStyle:
    """How OpenCL C is written for a device's compiler. No key changes what is summed in which order, in float32.

    `samplers`: textures are read through a sampler. `private_arrays`: the last columns of a row are stored through an array,
    which some compilers keep in memory; else one by one. `vector_loads`: plain contractions read four steps of depth of the
    left operand by one aligned load, and address tensors by offsets of 32 bits; stream lanes read units likewise.
    `copies_between_steps`: a kernel's stream lane copies between the steps of its work; else after it, in fewer
    registers. `longest_row`: a convolution of few channels whose rows of taps have at most so many elements reads windows of
    whole rows, and sums halves in float. Longer rows do not fit in registers.
    """

    multiply_add: MultiplyAdd = "fma"  # where products are summed; fma only where the device has it in hardware
    samplers: bool = True
    private_arrays: bool = True
    vector_loads: bool = False
    copies_between_steps: bool = True
    longest_row: int = 0


IMPORT_HOST_MEMORY = "cl_arm_import_memory_host"
"""OpenCL extension by which a GPU uses pages of the process in place. Its probe finds whether also those of a mapped file."""

SHUFFLES = ("cl_khr_subgroup_shuffle", "cl_qcom_subgroup_shuffle")
"""OpenCL C extensions by which work-items of a subgroup exchange registers."""


@dataclass(frozen=True)
class Rates:
    """Measured rates of a device, from which the planner computes times. Bytes per second, FLOP per second, seconds.

    `contention`, by transfer mode, is the share of a transfer's time by which it delays simultaneous kernels. It is 0 with a
    free copy engine, and 1 where kernels stop until the transfer is done. The defaults are those of a plain CPU. A given table
    must name every mode in use.
    """

    gemm_flops: float = 100e9
    memory_bandwidth: float = 10e9
    copy_bandwidth: float = 5e9  # host memory -> texture, or populating mapped pages
    disk_bandwidth: float = 1e9  # a file outside the page cache
    cached_bandwidth: float = 4e9  # a file in the page cache
    launch_seconds: float = 20e-6
    load_seconds: float = 50e-6  # fixed cost of one slice
    session_seconds: float = 50e-3  # fixed cost of opening a session, without kernels and weights; the driver is loaded
    kernel_seconds: float = 1e-3  # loading one kernel from the program cache
    layer_seconds: float = 1e-4  # fixed cost of one layer: reading it from the bundle, setting its arguments
    run_seconds: float = 0.0  # fixed cost of a run on the host: inputs, outputs, its report; 0: not measured
    contention: dict[TransferMode, float] = field(
        default_factory=lambda: {"map": 0.7, "alias": 0.9, "dma": 0.8, "interleave": 1.6}
    )
    conv_flops: float = 0.0  # of depthwise convolutions and those with more than one tap; 0: the same as gemm_flops

    def contention_of(self, mode: TransferMode) -> float:
        """The contention of `mode`.

        Raises:
            UserError: it is unknown. A default of 0 would be wrong.
        """
        if mode not in self.contention:
            raise UserError(
                f"the device's descriptor has no contention rate for transfer mode {mode!r}; measure it with flashmem profile, "
                f"or add it under [rates.contention]"
            )
        return self.contention[mode]

    def flops_of(self, family: str) -> float:
        """FLOP per second of a kernel family (`KernelShape.family`)."""
        return self.conv_flops or self.gemm_flops if family in ("conv", "depthwise") else self.gemm_flops


@dataclass(frozen=True)
class DeviceDescriptor:
    """A device as data. The defaults are those of a plain CPU, so that an unknown device still runs."""

    name: str
    kind: Literal["cpu", "gpu"] = "cpu"
    memory_paths: tuple[MemoryPath, ...] = ("buffer", "texture")  # the first is the default
    modes: dict[str, tuple[TransferMode, ...]] = field(  # per memory path; the first is the default
        default_factory=lambda: {"buffer": ("map", "dma", "alias", "interleave"), "texture": ("dma", "interleave")}
    )
    shares_memory: bool = True  # host and device have one memory; else a load into the device's is a copy from pinned memory
    uses_host_memory: bool = True  # kernels read and write any host memory in place; a GPU that imports pages of files does not
    image_max_width: int = 8192  # texels
    image_max_height: int = 8192
    image_pitch_alignment: int = 0  # texels; 0: no image2d from buffer
    max_alloc_bytes: int = 1 << 30
    cores: int = 0  # the cores of `parallelism` and `gemm_flops`, if devices of this name differ in cores; 0: they do not
    page_bytes: int = DEFAULT_PAGE  # page size of the system, or a multiple: weight files for the device are laid out for it
    parallelism: int = 8  # work-items that keep it busy; few on a CPU, where a work-item is a thread's vector loop
    local_bytes: int = 32768  # local memory of a work-group that leaves a core enough groups; attention's plain form fits it
    loader_threads: int = 2  # threads that read and copy weights; fewer where a limit is too small for their staging
    instruction_set: str = ""  # of a CPU: what its tile, configs, tuning database and rates are for; "": not known
    tile: PlainTile = field(default_factory=PlainTile)
    configs: tuple[ConfigTable, ...] = ()  # kernel configs to choose from in addition to `tile`
    features: tuple[Feature, ...] = get_args(Feature)  # of its driver, which some configs need
    code: CodeStyle = field(default_factory=CodeStyle)  # how kernels are written for the device's compiler
    only: str = ""  # name of the one config to use wherever it is possible, for measurements
    tuned: str = ""  # the tuning database next to the descriptor, without .tuned.csv; "": none
    dot_products: bool = False  # whether products of 8-bit integers are dot products of words
    command_buffers: bool = False  # whether recorded launches were faster in measurements (flashmem profile)
    probed: dict[str, str] = field(default_factory=dict)  # by extension, the `Device.driver` on which its probe passed
    rates: Rates = field(default_factory=Rates)
    capacity_model: str = ""  # next to the descriptor: NAME.seconds.ubj and NAME.slowdown.ubj, trained; "": the roofline
    counted: str = ""  # counted instructions of kernel configs next to the descriptor, without .code.csv; "": none
    pipelines: Pipelines | None = None  # of a GPU, for models of its family and counted instructions
    registers: RegisterFile | None = None  # of a GPU core, which estimates charge; None: they are not known
    measured: bool = False
    measured_on: str = ""  # the processor of measured rates, as named by `runtime.opencl.processor.processor_of`
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def vector_floats(self) -> int:
        """Floats of a vector register of a CPU, at least 8: the compiler halves vectors that its registers do not hold."""
        known = INSTRUCTION_SETS.get(self.instruction_set, INSTRUCTION_SETS["avx2"])
        return max(8, known.register_bytes // 4)

    def to_dict(self) -> dict[str, Any]:
        """The descriptor as JSON data."""
        return {**asdict(self), "configs": [each.to_dict() for each in self.configs]}

    def runtime_part(self) -> dict[str, Any]:
        """The descriptor as JSON data, without what only the compiler reads: all that a bundle has of it."""
        return without_compiler_part(self.to_dict())

    @property
    def portable(self) -> DeviceDescriptor:
        """The same descriptor without this machine's folders: files next to a descriptor file are named without a path."""
        return self._beside(lambda name: Path(name).name)

    def _beside(self, placed: Callable[[str], str]) -> DeviceDescriptor:
        """The same descriptor with `placed` names of the files next to it."""
        model, counted, tuned = (placed(name) if name else "" for name in (self.capacity_model, self.counted, self.tuned))
        return replace(self, capacity_model=model, counted=counted, tuned=tuned)

    def with_probed(self, probed: Mapping[str, str]) -> DeviceDescriptor:
        """The same device with results of probes: by extension, the driver (`Device.driver`) on which its probe passed.

        A GPU that shares the host's memory and imports it gets mode `map` after its own modes. `alias` and `map` only share the
        memory's bandwidth with kernels, so `map` has the contention of `alias`.
        """
        if self.kind == "cpu" or not self.shares_memory or IMPORT_HOST_MEMORY not in probed:
            return replace(self, probed=dict(probed))
        modes = {path: (*dict.fromkeys((*own, "map")),) for path, own in self.modes.items()}
        contention: dict[TransferMode, float] = {"map": self.rates.contention_of("alias"), **self.rates.contention}
        return replace(self, probed=dict(probed), modes=modes, rates=replace(self.rates, contention=contention))

    def with_cores(self, cores: int) -> DeviceDescriptor:
        """The same device with another number of cores, its arithmetic rates in proportion; unchanged if it states no cores."""
        if not self.cores or cores < 1 or cores == self.cores or self.measured:
            return self
        share = cores / self.cores
        rates = replace(self.rates, gemm_flops=self.rates.gemm_flops * share, conv_flops=self.rates.conv_flops * share)
        pipes = self.pipelines
        if pipes is not None:
            widths = {name: getattr(pipes, name) * share for name in ("lanes", "texture_bytes", "load_bytes")}
            pipes = replace(pipes, **widths)
        return replace(self, cores=cores, parallelism=max(1, round(self.parallelism * share)), rates=rates, pipelines=pipes)

    def for_instruction_set(self, name: str) -> DeviceDescriptor:
        """The same CPU where kernels are compiled for instruction set `name`; unchanged if it states none, or this one.

        Its tiles, also that of Winograd's algorithm, follow from the registers, and arithmetic rates change with the bytes of
        one. It has no tuning database: kernels were measured with other registers.

        Raises:
            UserError: `name` is unknown.
        """
        if not self.instruction_set or name == self.instruction_set:
            return self
        kind = _instructions(name, self.name)
        width = kind.register_bytes / INSTRUCTION_SETS[self.instruction_set].register_bytes
        rates = replace(self.rates, gemm_flops=self.rates.gemm_flops * width, conv_flops=self.rates.conv_flops * width)
        tile = cpu_tile(kind)
        following = (dict(each.values) for each in self.configs if each.kind == _FOLLOWS_TILE)
        winograd = next((each for each in following if each.get("panel_columns") == PANEL), None)
        own = {"rows": tile.rows, "columns": tile.columns, "vector": tile.vector}
        configs = () if winograd is None else (ConfigTable(_FOLLOWS_TILE, tuple((winograd | own).items())),)
        return replace(self, instruction_set=name, tile=tile, configs=configs, tuned="", rates=rates)

    @classmethod
    def from_dict(cls, data: dict[str, Any], *, where: str = "device descriptor") -> DeviceDescriptor:
        """The descriptor in `data`, in the form of `to_dict` or of a TOML file.

        Raises:
            UserError: an unknown key, so that a misspelt one is not ignored; a transfer mode without its contention.
        """
        values = dict(data)
        default = True if values.get("kind") != "gpu" else None  # a plain CPU's
        if any(type(values.get(key, default)) is not bool for key in ("shares_memory", "uses_host_memory")):
            raise UserError(
                f"{where}: say shares_memory = true, or false for a device with memory of its own; and uses_host_memory = true "
                "if its kernels use any memory of the host in place, as those of a CPU do, else false"
            )
        tile = dict(values.get("tile", {}))
        if instructions := values.get("instruction_set"):
            tile = asdict(cpu_tile(_instructions(instructions, where))) | tile
        values["tile"] = build(PlainTile, tile, where)
        values["code"] = build(CodeStyle, values.get("code", {}), where)
        values["registers"] = build(RegisterFile, values["registers"], where) if values.get("registers") else None
        values["pipelines"] = build(Pipelines, values["pipelines"], where) if values.get("pipelines") else None
        rates = dict(values.get("rates", {}))
        rates.setdefault("contention", {})  # no default: a plain CPU's contention would be wrong for another device
        values["rates"] = build(Rates, rates, where)
        values["configs"] = tuple(map(ConfigTable.of, values.get("configs", ())))
        if "modes" in values:
            values["modes"] = {path: tuple(modes) for path, modes in values["modes"].items()}
        descriptor = build(cls, values, where)
        if descriptor.code.multiply_add not in (ways := get_args(MultiplyAdd)):
            raise UserError(f"{where}: multiply_add is {descriptor.code.multiply_add!r}; name one of: {', '.join(ways)}")
        threads = descriptor.loader_threads
        if not isinstance(threads, int) or not 1 <= threads <= MOST_LOADER_THREADS:
            raise UserError(f"{where}: loader_threads is {threads}; give a number from 1 to {MOST_LOADER_THREADS}")
        if type(descriptor.page_bytes) is int and not is_page_size(descriptor.page_bytes):
            raise UserError(f"{where}: page_bytes is {descriptor.page_bytes}; name a power of two from 4096 to {LARGEST_PAGE}")
        probed = descriptor.probed
        if not isinstance(probed, dict) or not all(isinstance(driver, str) for driver in probed.values()):
            raise UserError(f"{where}: probed is {probed!r}; give a table with the driver of each extension whose probe passed")
        descriptor.check_contention(where)
        return descriptor

    def check_contention(self, where: str) -> None:
        """Raise UserError unless the contention of each of the device's transfer modes is known."""
        for mode in sorted({mode for modes in self.modes.values() for mode in modes}):
            if mode not in self.rates.contention:
                raise UserError(
                    f"{where}: the contention of transfer mode {mode!r} is missing; add it under [rates.contention], or "
                    "measure the device with flashmem profile"
                )

    def on_path(self, path: str) -> DeviceDescriptor:
        """The same device with `path` as its default memory path.

        Raises:
            UserError: the device lacks that path.
        """
        if path not in self.memory_paths:
            raise UserError(f"device {self.name} has no memory path {path!r}; it has {', '.join(self.memory_paths)}")
        return replace(self, memory_paths=tuple(sorted(self.memory_paths, key=lambda known: known != path)))


_FOR_COMPILERS = frozenset(
    {"tile", "configs", "features", "code", "only", "tuned", "counted", "dot_products", "registers", "local_bytes"}
)
"""The keys of a descriptor that only the compiler reads."""


def without_compiler_part(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a descriptor that the runtime reads; bundles of earlier versions have all of it."""
    return {key: value for key, value in data.items() if key not in _FOR_COMPILERS}


def _instructions(name: str, where: str) -> InstructionSet:
    """The instruction set called `name`.

    Raises:
        UserError: there is none.
    """
    if name not in INSTRUCTION_SETS:
        raise UserError(f"{where}: unknown instruction set {name!r}; name one of: {', '.join(INSTRUCTION_SETS)}")
    return INSTRUCTION_SETS[name]


def descriptor_names() -> tuple[str, ...]:
    """Names of the package's descriptors."""
    return names("devices", ".toml")


def load_descriptor(name_or_path: str) -> DeviceDescriptor:
    """Load a descriptor of the package by its name, or one from a TOML file.

    Raises:
        MissingFileError: neither a known name nor a file.
        UserError: the file is not a descriptor.
    """
    folder: Path | None = None
    if name_or_path in descriptor_names():
        text = read_text("devices", f"{name_or_path}.toml")
    else:
        path = Path(name_or_path)
        if not path.is_file():
            known = ", ".join(descriptor_names())
            raise MissingFileError(f"no device descriptor {name_or_path!r}; name a TOML file or one of: {known}")
        text, folder = path.read_text(encoding="utf-8"), path.parent.absolute()
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{name_or_path} is not valid TOML: {error}") from error
    descriptor = DeviceDescriptor.from_dict(data, where=name_or_path)
    return descriptor if folder is None else descriptor._beside(lambda name: str(folder / name))
