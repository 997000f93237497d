"""Calls of the commands for bundles: check, verify, replan, queue and cache."""

from __future__ import annotations

from pathlib import Path

from flashmem.cli.calls.call import BUNDLE, DEVICE, HOST_BUDGET, JSON, CommandCall
from flashmem.request.description import Converted, OptionSet, argument, option
from flashmem.request.kinds import File, Kind, Numeric, Several, Size
from flashmem.request.opening import HostBytes


class CheckCommand(OptionSet, CommandCall):
    """Read all of a bundle, including the weights, and check that it is undamaged."""

    module = "flashmem.cli.commands.bundles"

    bundle: Path = argument(BUNDLE, kw_only=False, kind=File("model.flashmem"))
    json: bool = option(JSON, default=False)

    def run(self) -> None:
        """Check the bundle."""
        from flashmem.cli.commands.bundles import check_bundle

        check_bundle(self.bundle, as_json=self.json)


class VerifyCommand(OptionSet, CommandCall):
    """Check what the driver makes of each kernel of a bundle: every launch, compared with the kernel's text."""

    module = "flashmem.cli.commands.verify"

    bundle: Path = argument(BUNDLE, kw_only=False, kind=File("model.flashmem"))
    device: str = option(DEVICE, default="auto", kind=Kind("NAME"))
    again: bool = option("Check what an earlier check found right, too.", default=False)
    seconds: float | None = option("Begin no check after S seconds.", default=None, kind=Numeric("S", float))
    json: bool = option(JSON, default=False)

    def run(self) -> int:
        """Check the kernels; 1 if one cannot be used."""
        from flashmem.cli.commands.verify import verify_bundle

        right = verify_bundle(self.bundle, self.device, again=self.again, seconds=self.seconds, as_json=self.json)
        return 0 if right else 1


class ReplanCommand(OptionSet, CommandCall):
    """Plan a bundle again for another budget, without its model and without a solver, and print the bundle's path."""

    module = "flashmem.tools.learn"

    bundle: Path = argument(BUNDLE, kw_only=False, kind=File("model.flashmem"))
    budget: Converted[int | str, int] = option("The new limit on all memory.", kind=Size())
    output: Path | None = option(
        "A new bundle that shares its weights.", default=None, kind=File("other.flashmem"), flags=("-o", "--output")
    )

    def run(self) -> None:
        """Plan, and print the path."""
        from flashmem.cli.commands.bundles import replan_bundle

        print(replan_bundle(self.bundle, self.budget, self.output))


class ListCacheCommand(OptionSet, CommandCall):
    """List the bundles in the user's cache (model, size, time of last use), and the size of the compiled kernels."""

    module = "flashmem.cli.commands.bundles"

    json: bool = option(JSON, default=False)

    def run(self) -> None:
        """List them."""
        from flashmem.cli.commands.bundles import list_cache

        list_cache(as_json=self.json)


class ClearCacheCommand(OptionSet, CommandCall):
    """Remove compiled kernels, and all bundles except those that a session has open."""

    module = "flashmem.cli.commands.bundles"

    def run(self) -> None:
        """Remove them."""
        from flashmem.cli.commands.bundles import clear_cache

        clear_cache()


class QueueCommand(OptionSet, CommandCall):
    """Run requests to several models under one budget, in their order in time, and print how long each waited."""

    module = "flashmem.cli.commands.queue"

    bundles: tuple[Path, ...] = argument("Compiled models.", kw_only=False, kind=Several("BUNDLE", File()))
    budget: HostBytes = option("Limit on the memory of all of them together.", default=None, kind=Size(auto="auto"))
    trace: Path | None = option(
        'Requests: [{"model": "a", "at": 0.5, "seed": 1}, ...].', default=None, kind=File("requests.json")
    )
    iterations: int = option("Without --trace: runs of each, in random order.", default=10, kind=Numeric("N", least=1))
    seed: int = option("Seed of that order, and of inputs.", default=0, kind=Numeric("N", least=0))
    device: str = option(DEVICE, default="auto", kind=Kind("NAME"))
    host_budget: HostBytes = option(HOST_BUDGET, default=None, kind=Size("SIZE|auto", auto="auto"))
    plot: Path | None = option(
        "Plot of memory over time, with preloading sessions (plots extra).", default=None, kind=File("memory.png")
    )
    json: bool = option(JSON, default=False)

    def run(self) -> None:
        """Run the requests."""
        from flashmem.cli.commands.queue import play_queue

        play_queue(self)
