"""What a process knows of its own life."""

import subprocess
import sys
import time


def test_a_process_knows_its_age() -> None:
    load = "from components.common.process.lifetime import process_age_s"
    code = f"import time; {load}; time.sleep(0.5); print(process_age_s())"
    before = time.monotonic()
    told = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.5 <= told <= time.monotonic() - before + 0.02
