"""fedflat export: write a model for other tools."""

from __future__ import annotations

from pathlib import Path

from fedflat.cli.shared.flags import AVERAGE, JSON, ROUND, RUN, optional
from fedflat.cli.shared.screen import print_json, screen, shown_bytes


def export(
    folder: Path = RUN,
    format: str | None = optional(
        "--format", "torch, safetensors, onnx or peft", "by the extension of --out, else torch", metavar="NAME"
    ),
    average: str = AVERAGE,
    rounds: int | None = ROUND,
    out: Path | None = optional(
        "--out", "output file, or folder for peft", "in exported/ inside the run", metavar="FILE"
    ),
    as_json: bool = JSON,
) -> None:
    """Export a model as a torch state_dict, a safetensors file, an ONNX graph or an adapter for peft.

    Example: fedflat export runs/fedmoswa-digits-seed0 --format onnx --out model.onnx
    """
    from fedflat.experiment.analysis.reopen import require_model
    from fedflat.experiment.store.export import ENDINGS, format_of
    from fedflat.experiment.store.run_folder import model_file, snapshot_file
    from fedflat.reporting.result import Result

    export_format = format_of(out or Path("model"), format if out else format or "torch")
    result = Result.load(folder)
    model = require_model(result.record, average)
    if out is None:
        source = Path(model_file(model) if rounds is None else snapshot_file(model, rounds))
        extension = next((ending for ending, known in ENDINGS.items() if known == export_format), "-adapter")
        out = folder / "exported" / f"{source.name.removesuffix('.safetensors')}{extension}"
    with screen(stderr=True).status("exporting to ONNX (up to a minute)" if export_format == "onnx" else "writing"):
        result.export(out, model, format=export_format, rounds=rounds)
    size = sum(file.stat().st_size for file in (out.glob("adapter_*") if out.is_dir() else [out]))
    if as_json:
        print_json(
            {"folder": folder, "model": model, "round": rounds, "format": export_format, "file": out, "bytes": size}
        )
    else:
        screen().print(f"{out} ({export_format}, {shown_bytes(size)})")
        arguments = [repr(model)] * (model != "server") + [f"rounds={rounds}"] * (rounds is not None)
        call = f"fedflat.load({str(folder)!r}).model({', '.join(arguments)})"
        screen().print(f"The same model in Python: {call}", style="dim")
