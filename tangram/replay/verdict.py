"""What a verification found, in words and as JSON. Pure."""

from dataclasses import asdict

from tangram.replay.told import count
from tangram.replay.verify import Difference, Report
from tangram.scheduler.state import BEHAVIOUR


def summary(report: Report) -> dict[str, object]:
    found = asdict(report)
    found["others"] = {str(version): number for version, number in report.others.items()}
    return {"ok": report.ok, "behaviour": BEHAVIOUR, **found}


def text(report: Report) -> str:
    """The last line is for who has no time."""
    lines = []
    if report.differences:
        lines += [*story(report.differences[0]), ""]
    policies = ", ".join(dict.fromkeys(report.policies)) or "-"
    lines.append(
        f"{count(report.messages, 'message')}, {report.first_seq} to {report.last_seq}: {count(report.actions, 'action')} ended,"
        f" {count(report.windows, 'window')}, {count(report.rulings, 'ruling')}; policy {policies}"
    )
    for version, number in report.others.items():
        lines.append(f"{count(number, 'window')} of a leader with behaviour {version} (here: {BEHAVIOUR}) not made anew")
    if report.unmade:
        lines.append(f"{count(report.unmade, 'window')} planned before the log begins not made anew")
    if report.fallbacks:
        lines.append(f"{count(report.fallbacks, 'window')} made by the fallback, because the pass had failed")
    if report.skipped:
        lines.append(f"{count(report.skipped, 'message')} skipped, as every fold does")
    if report.rulings_differ:
        lines.append(f"{report.rulings_differ} of {count(report.rulings, 'ruling')} differ")
    lines.append(f"{report.differ} of {count(report.windows, 'window')} differ")
    return "\n".join(lines)


def story(difference: Difference) -> list[str]:
    """The first one that differs."""
    leader = difference.leader or "a leader from before the log"
    if not difference.window:
        lines = [
            f"sequence {difference.seq}: a ruling that the state does not owe, by {difference.leader or 'an earlier leader'}"
        ]
    else:
        where = f"window {difference.window} differs at sequence {difference.seq}"
        lines = [f"{where}; planned on the log up to {difference.through_seq} by {leader}"]
        if difference.failed:
            lines.append(f"  the pass fails here: {difference.failed}")
        if difference.same_state:
            lines.append("  the state was the leader's: the decision was changed, or this code decides otherwise")
        else:
            lines.append(
                f"  the state was another than the leader's: after {difference.agreed_seq} it was the same, so a message from"
                f" {difference.agreed_seq + 1} to {difference.through_seq} was changed, or this code folds otherwise"
            )
    for change in difference.changes:
        lines.append(f"  {change.what}")
        lines.append(f"    was decided: {change.decided or 'nothing'}")
        lines.append(f"    would be:    {change.would_be or 'nothing'}")
    return lines
