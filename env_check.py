"""Is this machine fit to train?

    python env_check.py --ranks 2

Prints `ok | warn | fail  name  what was found  -> what to do about it` for each check, then `ready`, or the
list of what to fix and exit code 1. Takes under a minute on CPU.

Copy with: picospore/launch.py
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from picospore.launch import is_rank, is_scheduler, rank_main, run_ranks

PYTHON_RANGE = ((3, 11), (3, 12))  # that the pinned packages exist for
MIN_FREE_GIB = 5.0  # the environment's own 3 GB, a small data set and a few checkpoints of a small model
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
KNOWN_PRODUCT = [7, 10, 15, 22]  # [[1, 2], [3, 4]] squared
INSTALL = "pip install -r requirements.txt -c constraints.txt"


@dataclass(frozen=True)
class Check:
    name: str
    status: str  # ok, warn or fail
    detail: str
    fix: str = ""

    def __str__(self) -> str:
        arrow = f"  -> {self.fix}" if self.fix else ""
        return f"{self.status:<5} {self.name:<12} {self.detail}{arrow}"


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    low, high = (".".join(map(str, bound)) for bound in PYTHON_RANGE)
    found = ".".join(map(str, version))
    if PYTHON_RANGE[0] <= version <= PYTHON_RANGE[1]:
        return Check("python", "ok", found)
    return Check("python", "fail", f"{found}, MindSpore needs {low} to {high}", f"install Python {high}")


def check_numpy(version: str | None) -> Check:
    if version is None:
        return Check("numpy", "fail", "not installed", INSTALL)
    if int(version.split(".")[0]) >= 2:
        return Check("numpy", "fail", f"{version}, MindSpore needs less than 2", 'pip install "numpy<2"')
    return Check("numpy", "ok", version)


def check_pair(mindspore: str | None, mindformers: str | None, version_map: Mapping | None) -> Check:
    """MindFormers says itself which MindSpore each of its versions works with."""
    if mindspore is None:
        return Check("mindspore", "fail", "not installed", INSTALL)
    if mindformers is None:
        return Check("mindspore", "fail", f"{mindspore}, but mindformers is not installed", INSTALL)
    pair = f"mindspore {mindspore} with mindformers {mindformers}"
    known = (version_map or {}).get("mf", {}).get(mindformers)
    if known is None:
        return Check(
            "mindspore", "warn", f"{pair}: not in its VERSION_MAP.json", f"take the pair of {INSTALL}"
        )
    if mindspore not in known["support"]:
        fix = f'pip install "mindspore=={known["prefer"]}"'
        return Check("mindspore", "fail", f"{pair}, which supports {', '.join(known['support'])}", fix)
    return Check("mindspore", "ok", pair)


def read_version_map() -> dict | None:
    """From the installed files: importing mindformers is slow, and fails where the pair is wrong."""
    files = importlib.metadata.files("mindformers") if installed_version("mindformers") else None
    path = next((file.locate() for file in files or [] if file.name == "VERSION_MAP.json"), None)
    return json.loads(Path(path).read_text()) if path else None


def check_packages(requirements: str, version_of: Callable[[str], str | None] = installed_version) -> Check:
    pins = re.findall(r"^([\w.-]+)==([\w.]+)", requirements, re.MULTILINE)
    missing = [package for package, _ in pins if version_of(package) is None]
    if missing:
        return Check("packages", "fail", f"not installed: {', '.join(missing)}", INSTALL)
    other = [f"{name} {version_of(name)} instead of {pin}" for name, pin in pins if version_of(name) != pin]
    if other:
        return Check("packages", "warn", f"untested: {', '.join(other)}", INSTALL)
    return Check("packages", "ok", f"{len(pins)} pinned packages as tested")


def check_disk(free_gib: float, folder: Path) -> Check:
    detail = f"{free_gib:.1f} GiB free in {folder}"
    if free_gib >= MIN_FREE_GIB:
        return Check("disk", "ok", detail)
    return Check("disk", "fail", detail, f"free at least {MIN_FREE_GIB:.0f} GiB, or work in another folder")


def check_device(device: str, product: list[int], ascend_cards: int) -> Check:
    if device == "Ascend" and not ascend_cards:
        fix = (
            "install the driver and CANN that fit MindSpore (`npu-smi info` shows the cards), or --device CPU"
        )
        return Check("device", "fail", "no Ascend device is visible", fix)
    if product != KNOWN_PRODUCT:
        fix = "reinstall mindspore; on Ascend try another card (DEVICE_ID) and read `npu-smi info`"
        return Check("device", "fail", f"{device} computed {product} instead of {KNOWN_PRODUCT}", fix)
    return Check(
        "device", "ok", f"{device} ({ascend_cards or 'no'} Ascend devices here), matrix product right"
    )


def check_all_reduce(ranks: int, exit_code: int, summed: list[int] | None, log_dir: Path) -> Check:
    """Rank r put r + 1 at position r, so the sum also shows which rank was left out or counted twice."""
    expected = list(range(1, ranks + 1))
    if exit_code == 0 and summed == expected:
        return Check("all-reduce", "ok", f"the contributions of {ranks} ranks arrived")
    if summed is None:
        fix = f"see the reason above and the logs in {log_dir}"
        return Check("all-reduce", "fail", f"{ranks} ranks did not finish, exit code {exit_code}", fix)
    detail = f"{ranks} ranks summed to {summed} instead of {expected}, exit code {exit_code}"
    return Check("all-reduce", "fail", detail, f"end other jobs on these devices; logs in {log_dir}")


# ---- what the last two checks look at ---------------------------------------------------------------------


def ascend_device_count() -> int:
    from mindspore.device_context import ascend

    return ascend.device_count() if ascend.is_available() else 0


def measure_product(device: str) -> list[int]:
    import mindspore as ms

    ms.set_device(device)  # for Ascend never run by us: we have no card
    x = ms.Tensor([[1.0, 2.0], [3.0, 4.0]], ms.float32)
    return [int(value) for value in ms.ops.matmul(x, x).asnumpy().ravel()]


def all_reduce(device: str, answer: Path) -> int:
    """What each rank runs."""
    import mindspore as ms
    from mindspore.communication import get_group_size, get_rank, init

    ms.set_device(device)
    init()
    rank = get_rank()
    mine = [rank + 1.0 if position == rank else 0.0 for position in range(get_group_size())]
    summed = ms.ops.AllReduce()(ms.Tensor(mine, ms.float32)).asnumpy()
    if rank == 0:
        answer.write_text(json.dumps([int(value) for value in summed]))
    return 0


def run_all_reduce(ranks: int, device: str) -> Check:
    log_dir = Path(tempfile.mkdtemp(prefix="env_check_"))
    answer = log_dir / "sum.json"
    code = run_ranks([__file__, "--device", device, "--answer", str(answer)], ranks, log_dir)
    summed = json.loads(answer.read_text()) if answer.exists() else None
    check = check_all_reduce(ranks, code, summed, log_dir)
    if check.status == "ok":
        shutil.rmtree(log_dir)
    return check


def run_device(asked: str) -> tuple[Check, str]:
    """MindSpore itself may be what is broken, so whatever it raises is a finding."""
    if asked != "Ascend":
        os.environ.setdefault("GLOG_v", "3")  # that Ascend's libraries are absent is no news then
    try:
        cards = ascend_device_count()
        device = asked if asked != "auto" else "Ascend" if cards else "CPU"
        product = measure_product(device) if device == "CPU" or cards else []
        return check_device(device, product, cards), device
    except Exception as error:
        reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        return Check("device", "fail", f"MindSpore does not run: {reason}", INSTALL), asked


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="how many ranks the all-reduce takes (2)")
    parser.add_argument("--device", choices=["auto", "CPU", "Ascend"], default="auto")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)  # in a rank: where the sum goes
    args = parser.parse_args(argv)
    if is_rank() or is_scheduler():
        return rank_main(lambda: all_reduce(args.device, args.answer))

    checks: list[Check] = []

    def report(check: Check) -> bool:
        print(check, flush=True)
        checks.append(check)
        return check.status != "fail"

    fits = report(check_python())
    fits &= report(check_numpy(installed_version("numpy")))
    versions = installed_version("mindspore"), installed_version("mindformers")
    fits &= report(check_pair(*versions, read_version_map()))
    if REQUIREMENTS.exists():  # it may have stayed behind when this script was copied
        report(check_packages(REQUIREMENTS.read_text()))
    report(check_disk(shutil.disk_usage(".").free / 2**30, Path.cwd()))
    if fits:  # otherwise MindSpore would only repeat, less clearly, what was said above
        check, device = run_device(args.device)
        if report(check):
            report(run_all_reduce(args.ranks, device))

    fixes = [f"{check.name}: {check.fix}" for check in checks if check.status == "fail"]
    print("ready" if not fixes else "\n".join(["", "to fix:", *fixes]))
    return 1 if fixes else 0


if __name__ == "__main__":
    sys.exit(main())
