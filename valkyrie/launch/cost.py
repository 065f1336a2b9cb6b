"""What a slice costs for the planned hours."""

from __future__ import annotations

from valkyrie.launch.options import Options


def cost(options: Options) -> str:
    """Return the price at list and spot prices in a line; an unknown one is said to be, none is guessed.

    Prices are dollars an hour of a chip: the options', else those of `conf/target/chip`, whose sources stand there.
    """
    hardware = options.hardware
    if hardware is None or hardware.chip is None or hardware.chips is None:
        return ""
    chips, chip = hardware.chips * options.slices, hardware.chip
    listed = options.usd_per_hour or chip.usd_per_hour
    spot = options.spot_usd_per_hour or chip.spot_usd_per_hour
    parts = [
        _total(chips, listed, options.hours, "list"),
        _total(chips, spot, options.hours, "spot"),
    ]
    order = reversed(parts) if options.spot else parts
    return f"cost of {chips} {chip.name} chip{'s' * (chips > 1)}: {'; '.join(order)}"


def _total(chips: int, price: float | None, hours: float, kind: str) -> str:
    if price is None:
        key = "usd_per_hour" if kind == "list" else "spot_usd_per_hour"
        return f"{kind} price not known here ({key}= of a chip sets it)"
    hourly = f"${chips * price:,.2f} an hour"
    total = f"${chips * price * hours:,.2f} for {hours:g} hours ({hourly})" if hours else hourly
    return f"{total} at the {kind} price of ${price:.2f} a chip"
