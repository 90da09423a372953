"""Make the CycloneDX SBOM of each image that containers/smoke builds, as a release does, and count what it lists.

python -m benchmarks.sboms --machine cpu-2core --built enginery-smoke smoke --into /tmp/sboms
"""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import click

from benchmarks.images import IMAGES, size_mb
from benchmarks.results import Results, result_options


def components(sbom: dict[str, Any]) -> Counter[str]:
    """How many components of each package type, such as "deb" and "pypi", by their package URLs."""
    return Counter(
        component["purl"].removeprefix("pkg:").partition("/")[0]
        for component in sbom["components"]
        if component.get("purl")
    )


@click.command()
@click.option("--built", nargs=2, required=True, metavar="REGISTRY TAG", help="Where the images are.")
@click.option("--into", required=True, type=click.Path(path_type=Path), help="Where the SBOMs go.")
@click.option("--trivy", default=".linters/bin/trivy", show_default=True, help="As `make lint-images` installs it.")
@click.option("--notes", default="", help="What a reader must know of the run.")
@result_options
def main(built: tuple[str, str], into: Path, trivy: str, notes: str, results: Results) -> None:
    """Write one SBOM per image, and sboms.json with what they list."""
    into.mkdir(parents=True, exist_ok=True)
    measures: dict[str, float] = {}
    runs = []
    for image in IMAGES:
        reference, file = f"{built[0]}/{image}:{built[1]}", into / f"{image}.cdx.json"
        command = [
            trivy,
            "image",
            "--quiet",
            "--timeout",
            "1h",
            "--format",
            "cyclonedx",
            "--output",
            str(file),
            reference,
        ]
        subprocess.run(command, check=True)
        sbom = json.loads(file.read_bytes())
        counted = components(sbom)
        measures[f"components_{image}"] = counted.total()
        runs.append(
            {
                "image": image,
                "format": f"{sbom['bomFormat']} {sbom['specVersion']}",
                "packages": dict(sorted(counted.items())),
                "image_mb": round(size_mb(reference), 1),
                "sbom_mb": round(file.stat().st_size / 1e6, 3),
            }
        )
        click.echo(f"{image}: {dict(counted)}")
    version = subprocess.run([trivy, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    text = "Of the images on stand-in bases, whose own packages are listed, too; no vulnerability database was asked."
    results.write(
        "sboms",
        measures=measures,
        runs=runs,
        notes=f"{text} {notes}".strip(),
        versions={"trivy": version},
    )


if __name__ == "__main__":
    main()
