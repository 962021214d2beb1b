"""The bill of materials of a wheel: what its libraries contain beside horoplug's own code (PEP 770, CycloneDX)."""

import datetime
import importlib.metadata
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pybind11
import ziglang
from cyclonedx.factory.license import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

LLVM = "Apache-2.0 WITH LLVM-exception"


class Part(NamedTuple):
    name: str
    version: str
    license: str
    text: Path  # of the licence


def parts() -> Iterator[Part]:
    zig = Path(ziglang.__file__).parent
    program = zig / "zig"
    said = subprocess.check_output([program, "c++", "--version"], text=True)
    clang = re.search(r"clang version (\S+)", said)
    assert clang, said
    for name in ("libcxx", "libcxxabi", "libunwind"):
        yield Part(name, clang[1], LLVM, zig / "lib" / name / "LICENSE.TXT")
    # Its implementation of compiler-rt.
    yield Part("zig", importlib.metadata.version("ziglang"), "MIT", zig / "LICENSE")
    (text,) = (
        Path(str(file.locate()))
        for file in importlib.metadata.files("pybind11") or ()
        if file.name == "LICENSE"
    )
    yield Part("pybind11", pybind11.__version__, "BSD-3-Clause", text)


def add(info: Path) -> None:
    """Writes the bill and the licences into a wheel's folder ``.dist-info``."""
    metadata = importlib.metadata.PathDistribution(info).metadata
    licenses = LicenseFactory()
    # The serial number and the time follow from version and date, so that two builds give the same bytes.
    date = int(os.environ["SOURCE_DATE_EPOCH"])
    bom = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"horoplug {metadata['Version']} {date}")
    )
    bom.metadata.timestamp = datetime.datetime.fromtimestamp(date, datetime.timezone.utc)
    bom.metadata.component = Component(
        name="horoplug",
        version=metadata["Version"],
        bom_ref="horoplug",
        type=ComponentType.LIBRARY,
        licenses=[licenses.make_from_string("Apache-2.0")],
        purl=PackageURL("pypi", name="horoplug", version=metadata["Version"]),
    )
    for part in parts():
        component = Component(
            name=part.name,
            bom_ref=part.name,
            version=part.version,
            type=ComponentType.LIBRARY,
            licenses=[licenses.make_from_string(part.license)],
        )
        bom.components.add(component)
        bom.register_dependency(bom.metadata.component, [component])
        text = info / "licenses" / part.name / part.text.name
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_bytes(part.text.read_bytes())
    folder = info / "sboms"
    folder.mkdir()
    (folder / "horoplug.cdx.json").write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n")
