"""Show the steps' times of a quickstart's summary and fail unless it says what a quickstart must say."""

import json
import sys
from pathlib import Path

MIN_FP32_TOP1_PCT = 97.0

summary = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
for step in summary["steps"]:
    total_s, work_s = step["seconds_total"], step["seconds_work"]
    print(f"{step['name']:>10}  {step['status']:<6} {total_s:6.1f} s, of which {work_s:.1f} s its own work")
print(f"{'all':>10}  {summary['status']:<6} {summary['seconds_total']:6.1f} s")

rows = {row["precision"]: row for row in summary["rows"]}
fp32_score_pct = rows.get("fp32", {}).get("score_pct") or 0.0
verdict = rows.get("int8", {}).get("verdict", "missing")
checks = {
    f"the run is done: {summary['status']}": summary["status"] == "done",
    f"INT8 passes its gate: {verdict}": verdict == "pass",
    f"FP32 top-1 is at least {MIN_FP32_TOP1_PCT:g} %: {fp32_score_pct:.2f} %": fp32_score_pct >= MIN_FP32_TOP1_PCT,
}
for text, holds in checks.items():
    print("ok    " if holds else "FAILED", text)
sys.exit(0 if all(checks.values()) else 1)
