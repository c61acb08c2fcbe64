"""`hf-replayssm doctor`: versions, devices, backends, what a model gets, and whether replay is right here."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Annotated, Any

import typer

from . import common


# Distribution names, and what each is for. None of the optional ones is needed.
NEEDED = ("torch", "transformers", "datasets", "accelerate")
OPTIONAL = {
    "triton": "kernels of this package on GPUs",
    "mamba_ssm": "transformers' fast prefill",
    "flash-linear-attention": "a fast prefill without a compiler (pip install 'hf-replayssm[fla]')",
    "causal_conv1d": "transformers' fast convolution",
    "kernels": "kernels from the Hub",
    "peft": "adapters",
}


@common.one_line_errors
def doctor(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Say what this model gets; only its config is read.", metavar="ID_OR_PATH"),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check on tiny models that replay is right: the model's family, or all.")
    ] = False,
    device: common.DeviceOption = "auto",
    backend: Annotated[str, typer.Option("--backend", help="triton, torch, or auto.")] = "auto",
    json: common.JsonOption = None,
    debug: common.DebugOption = False,
) -> None:
    """Versions, devices, the backend of each op, and what a model gets.

    Exit code 1 if the model is not supported or a check fails.
    """
    common.check_json_target(json)
    place = common.pick_device(device)
    out = common.console(stderr=json == "-")
    report: dict[str, Any] = {
        "versions": _versions(),
        "devices": _devices(),
        "device": str(place),
        "ops": _ops(place, backend),
    }
    _print_environment(out, report)
    healthy = True
    config = None
    if model is not None:
        config = _config(model)
        report["model"] = _model_report(model, config)
        _print_model(out, report["model"])
        healthy = report["model"]["supported"]
    if check and healthy:
        report["checks"] = _run_checks(out, config, place)
        healthy = all(result["ok"] for result in report["checks"])
    report["ok"] = healthy
    common.emit_json(report, json)
    if not healthy:
        raise typer.Exit(1)


# ------------------------------------------------------------------------------------------------------- reports
def _versions() -> dict[str, Any]:
    from hf_replayssm.versions import TESTED_TRANSFORMERS, __version__, in_tested_range

    versions: dict[str, Any] = {"hf_replayssm": __version__, "python": platform.python_version()}
    for name in (*NEEDED, *OPTIONAL):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    versions["tested_transformers"] = TESTED_TRANSFORMERS
    versions["transformers_in_tested_range"] = in_tested_range()
    return versions


def _devices() -> list[dict[str, Any]]:
    import torch

    devices: list[dict[str, Any]] = [
        {"device": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory
        devices.append({"device": f"cuda:{index}", "name": properties.name, "memory_bytes": memory})
    if torch.backends.mps.is_available():
        devices.append({"device": "mps", "name": "Apple GPU"})
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        devices += [
            {"device": f"xpu:{index}", "name": torch.xpu.get_device_name(index)}
            for index in range(torch.xpu.device_count())
        ]
    return devices


def _ops(device: Any, backend: str) -> list[dict[str, str]]:
    from hf_replayssm.ops.backend import explain

    return [{"op": op, "backend": chosen, "reason": reason} for op, chosen, reason in explain(device, backend=backend)]


def _config(model: str) -> Any:
    from transformers import AutoConfig

    from hf_replayssm import bundled

    path = bundled.target_path() if model == common.BUNDLED else model
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)  # refuses instead of asking
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(common.explain_loading(str(path), error)) from error


def _model_report(model: str, config: Any) -> dict[str, Any]:
    from hf_replayssm.cache import describe_layers
    from hf_replayssm.families import FAMILIES

    decoder = config.get_text_config(decoder=True)
    report: dict[str, Any] = {"model": model, "model_type": config.model_type, "supported": False, "layers": []}
    if decoder.model_type in FAMILIES:
        report["supported"] = True
        report["recurrence"] = FAMILIES[decoder.model_type].recurrence
        report["layers"] = [
            {name: getattr(layer, name) for name in ("index", "layer_type", "cache_layer", "treatment")}
            for layer in describe_layers(config)
        ]
    else:
        has_state = "linear_attention" in (getattr(decoder, "layer_types", None) or [])
        reason = "its recurrent layers are of another kind" if has_state else "it has no recurrent layers"
        report["reason"] = (
            f"model type {config.model_type!r} is not supported ({reason}, or another class of model). Supported are "
            f"{', '.join(FAMILIES)}. It runs with transformers' own cache as before."
        )
    return report


def _run_checks(out: Any, config: Any, device: Any) -> list[dict[str, Any]]:
    from rich.text import Text

    from hf_replayssm.families import FAMILIES
    from hf_replayssm.selfcheck import self_check

    results = []
    out.print("\n[bold]Self-check[/bold] (tiny random models, float32)")
    config = None if config is None else config.get_text_config(decoder=True)
    for family in [config.model_type] if config is not None else list(FAMILIES):
        for result in self_check(family, config=config, device=device):
            results.append(result.to_dict())
            line = Text(f"  {family}: {result.check}: ")
            line.append("ok" if result.ok else "FAILED", style="green" if result.ok else "bold red")
            deviation = "" if result.error is None else f"error {result.error:.1e}, "
            line.append(f" ({deviation}{result.detail})")
            out.print(line)
    return results


# ------------------------------------------------------------------------------------------------------- printing
def _print_environment(out: Any, report: dict[str, Any]) -> None:
    from rich.table import Table

    versions = report["versions"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
    for name in ("hf_replayssm", "python", *NEEDED, *OPTIONAL):
        value = versions[name]
        note = OPTIONAL.get(name, "")
        if name == "transformers" and value is not None:
            inside = versions["transformers_in_tested_range"]
            note = f"{'in' if inside else 'OUTSIDE'} the tested range {versions['tested_transformers']}"
            if not inside:
                note += "; run doctor --check"
        table.add_row(name, value or "not installed", note)
    out.print("[bold]Versions[/bold]")
    out.print(table)

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
    for one in report["devices"]:
        more = [f"{one['memory_bytes'] / 2**30:.0f} GiB"] if "memory_bytes" in one else []
        more += [f"{one['threads']} threads"] if "threads" in one else []
        table.add_row(one["device"], one["name"], ", ".join(more))
    out.print("\n[bold]Devices[/bold]")
    out.print(table)

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 2))
    for op in report["ops"]:
        table.add_row(op["op"], op["backend"], op["reason"])
    out.print(f"\n[bold]Ops[/bold] on {report['device']}")
    out.print(table)


def _print_model(out: Any, model: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    out.print(Text(f"\nModel {model['model']} ({model['model_type']})", style="bold"))
    if not model["supported"]:
        out.print(Text(f"  not supported: {model['reason']}"))
        return
    out.print(Text(f"  supported: {model['recurrence']} layers by replay"))
    table = Table("layer", "type", "cache layer", "treatment", box=None, padding=(0, 2, 0, 2))
    for layer in model["layers"]:
        table.add_row(*(str(layer[name]) for name in ("index", "layer_type", "cache_layer", "treatment")))
    out.print(table)
