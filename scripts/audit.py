"""Check the pinned packages: pins, installed versions, licences and known vulnerabilities. Nothing is downloaded.

Rules that need no advisories:
- every line of constraints.txt is `name==version`, once per package, with the canonical spelling of the version;
- every requirement of pyproject.toml, direct or transitive, is pinned to a version that it allows;
- every pinned package is required;
- every installed package has the pinned version;
- every licence that an installed package states is in LICENCES, or the package in EXAMINED.

Advisories are records of the OSV format (https://ossf.github.io/osv-schema/): files, directories or zip archives of
them, each a record, a list of records, or `{"vulns": [...]}`. Withdrawn records and other ecosystems are ignored.
Exits with 1 if there are findings, and with 2 if an advisory cannot be read.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageMetadata, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
OWN = "thresher"
INSTALLED = ("dev", "deepspeed", "megatron")  # by scripts/install
# of torch's CUDA build, which pins them and adds NVIDIA's licences
CUDA = ("cuda-", "nvidia-", "triton")
# SPDX ids, and the older spellings of metadata without a licence expression
LICENCES = {
    *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC"),
    *("MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib"),
    *("Apache 2.0", "Apache 2.0 License", "Apache Software License", "Apache Software License 2.0"),
    *("3-Clause BSD License", "BSD", "BSD License", "ISC License (ISCL)", "MIT License"),
    *("Mozilla Public License 2.0 (MPL 2.0)", "Python Software Foundation License"),
}
# packages with other licences, and why they may be used
EXAMINED = {
    "docutils": "public domain and BSD; the file under the GPL is a mode for Emacs, which the wheel does not contain",
    "hjson": "MIT or Academic Free License 2.1, at choice",
}


class UnreadableError(Exception):
    """An advisory cannot be read."""


@dataclass(frozen=True)
class Pins:
    """The pinned version of each package, and the faults of the lines."""

    versions: Mapping[str, Version]
    faults: Sequence[str]


def read_pins(text: str) -> Pins:
    versions: dict[str, Version] = {}
    faults = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        name, _, spelled = line.partition("==")
        try:
            key, version = canonicalize_name(name, validate=True), Version(spelled)
        except (InvalidName, InvalidVersion):
            faults.append(f"line {number}: {line!r} does not pin an exact version; write name==version")
            continue
        if str(version) != spelled:
            faults.append(f"line {number}: {spelled!r} is not the canonical spelling; write {version}")
        elif key in versions:
            faults.append(f"line {number}: {name} is pinned twice; keep one")
        else:
            versions[key] = version
    return Pins(versions, faults)


def required(project: Mapping[str, Any]) -> Iterator[Requirement]:
    """Yield the requirements of the project with the extras INSTALLED and those that they name."""
    extras: Mapping[str, list[str]] = project["optional-dependencies"]
    waiting = [*project["dependencies"], *(each for extra in INSTALLED for each in extras[extra])]
    while waiting:
        requirement = Requirement(waiting.pop())
        if canonicalize_name(requirement.name) == OWN:
            waiting += [each for extra in requirement.extras for each in extras[extra]]
        elif requirement.marker is None or requirement.marker.evaluate():
            yield requirement


def brought_along(requirements: Iterable[Requirement]) -> Iterator[tuple[str, Requirement]]:
    """Yield every direct and transitive requirement with the package that requires it, from installed metadata."""
    waiting = [(OWN, each) for each in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        asker, requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name.startswith(CUDA):
            continue
        yield asker, requirement
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            inner = [Requirement(text) for text in distribution(name).requires or ()]
        except PackageNotFoundError:
            continue
        for each in inner:
            chosen = [{"extra": extra} for extra in ("", *extras)]
            if each.marker is None or any(each.marker.evaluate(environment) for environment in chosen):
                waiting.append((name, each))


def check_requirements(pins: Pins, requirements: Iterable[Requirement], unpinned: Sequence[str] = ()) -> list[str]:
    """Compare pins with requirements; `unpinned` are packages that every environment contains."""
    found = []
    needed = set()
    for asker, requirement in brought_along(requirements):
        name = canonicalize_name(requirement.name)
        needed.add(name)
        if name not in pins.versions:
            if name not in unpinned:
                found.append(f"{name}, required by {asker}, is not pinned")
        elif not requirement.specifier.contains(pins.versions[name], prereleases=True):
            found.append(f"{name} is pinned to {pins.versions[name]}, but {asker} requires {requirement.specifier}")
    found += [f"{name} is pinned, but nothing requires it" for name in pins.versions if name not in needed]
    return list(dict.fromkeys(found))


def check_installed(pins: Pins) -> list[str]:
    """Compare installed versions with the pins; a local version, such as +cpu, is the same release."""
    found = []
    for name, version in pins.versions.items():
        try:
            installed = Version(distribution(name).version)
        except PackageNotFoundError:
            found.append(f"{name} is pinned to {version}, but not installed")
            continue
        if installed.public != version.public:
            found.append(f"{name} is pinned to {version}, but {installed} is installed")
    return found


def check_licences(requirements: Iterable[Requirement]) -> list[str]:
    """List every direct or transitive requirement whose licence has not been examined."""
    names = {canonicalize_name(requirement.name) for _, requirement in brought_along(requirements)}
    found = []
    for name in sorted(names - EXAMINED.keys()):
        try:
            unknown = licences(distribution(name).metadata) - LICENCES
        except PackageNotFoundError:  # check_installed reports it
            continue
        found += [
            f"{name} has the licence {each!r}, which LICENCES in scripts/audit.py lacks" for each in sorted(unknown)
        ]
    return found


def licences(metadata: PackageMetadata) -> set[str]:
    """Every licence that metadata states: the ids of its expression, or its classifiers, or the field `License`."""
    classifiers = [each for each in metadata.get_all("Classifier") or () if each.startswith("License ::")]
    expression = re.sub("[()]", "", metadata.get("License-Expression", ""))  # they group; an id has none
    stated = expression or " AND ".join(each.rpartition(" :: ")[2] for each in classifiers)
    # an exception after WITH only adds permissions
    return set(re.split(" (?:AND|OR) ", re.sub(r" WITH \S+", "", stated or metadata.get("License", "none"))))


def read_advisories(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the records of files, directories and zip archives."""
    for path in paths:
        if path.is_dir():
            yield from read_advisories(sorted(path.rglob("*.json")))
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    yield from _records(archive.read(name), f"{path}:{name}")
        else:
            yield from _records(path.read_bytes(), str(path))


def _records(content: bytes, where: str) -> list[dict[str, Any]]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise UnreadableError(f"{where} is not JSON: {error}") from None
    if isinstance(value, dict) and "vulns" in value:
        value = value["vulns"]
    records = value if isinstance(value, list) else [value]
    if not all(isinstance(each, dict) and "id" in each for each in records):
        raise UnreadableError(f"{where} does not contain OSV records, which have an id")
    return records


def check_advisories(pins: Pins, records: Iterable[dict[str, Any]], ignored: Sequence[str] = ()) -> list[str]:
    """List every pinned version that an advisory affects."""
    found = []
    for record in records:
        names = {record["id"], *record.get("aliases", ())}
        if record.get("withdrawn") or names & set(ignored):
            continue
        for affected in record.get("affected", ()):
            package = affected.get("package", {})
            name = canonicalize_name(package.get("name", ""))
            if package.get("ecosystem", "").partition(":")[0] != "PyPI" or name not in pins.versions:
                continue
            try:
                is_affected = affects(affected, pins.versions[name])
            except (InvalidVersion, KeyError, TypeError, AttributeError) as error:
                raise UnreadableError(f"{record['id']} on {name} cannot be read: {error!r}") from None
            if is_affected:
                header = [f"{name} {pins.versions[name]}: {record['id']}", *sorted(names - {record["id"]})]
                fix = _fixed_in(affected, pins.versions[name])
                found.append(f"{', '.join(header)}: {record.get('summary', 'no summary')}; {fix}")
    return list(dict.fromkeys(found))


def affects(affected: Mapping[str, Any], version: Version) -> bool:
    """Evaluate as the OSV schema does: listed, or within a range of versions; ranges of commits are ignored."""
    if any(_is_version(text, version) for text in affected.get("versions", ())):
        return True
    ranges = [each for each in affected.get("ranges", ()) if each["type"] in ("ECOSYSTEM", "SEMVER")]
    return any(_in_range(each["events"], version) for each in ranges)


def _is_version(text: str, version: Version) -> bool:
    try:
        return Version(text) == version
    except InvalidVersion:  # old releases may have invalid versions; pinned ones are valid
        return False


def _in_range(events: Sequence[Mapping[str, str]], version: Version) -> bool:
    limits = [event["limit"] for event in events if "limit" in event]
    if limits and not any(limit == "*" or version < Version(limit) for limit in limits):
        return False
    turns = [(kind, text) for event in events for kind, text in event.items() if kind != "limit"]
    inside = False
    for kind, text in sorted(turns, key=lambda turn: (turn[1] != "0", Version(turn[1]))):
        if kind == "introduced" and (text == "0" or version >= Version(text)):
            inside = True
        elif (kind == "fixed" and version >= Version(text)) or (kind == "last_affected" and version > Version(text)):
            inside = False
    return inside


def _fixed_in(affected: Mapping[str, Any], version: Version) -> str:
    events = [event for each in affected.get("ranges", ()) if each["type"] != "GIT" for event in each["events"]]
    fixes = sorted(Version(event["fixed"]) for event in events if "fixed" in event)
    later = [fix for fix in fixes if fix > version]
    return f"fixed in {later[0]}" if later else "no fixed version is known"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("advisories", type=Path, nargs="*", help="OSV records: files, directories, zip archives")
    parser.add_argument("--ignore", action="append", default=[], metavar="ID", help="advisory to ignore")
    given = parser.parse_args(arguments)
    pins = read_pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [*pins.faults, *check_requirements(pins, required(project), UNPINNED), *check_installed(pins)]
    found += check_licences(required(project))
    try:
        records = list(read_advisories(given.advisories))
        found += check_advisories(pins, records, given.ignore)
    except (UnreadableError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    for line in found:
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"{len(pins.versions)} pins, {len(records)} advisories: {len(found)} findings\n")
    return int(bool(found))


# packages that every environment contains: pip and its tools
UNPINNED = ("pip", "setuptools", "wheel")


if __name__ == "__main__":
    sys.exit(main())
