"""A report as JUnit's XML, which servers that build and test show: a test for each case, type and law."""

from __future__ import annotations

from xml.etree import ElementTree

from refattn.messages import shown
from refattn.verify.outcome import LONGEST, CheckReport, Report


def junit(report: Report | CheckReport) -> str:
    """Return a report as XML: what fails is a failure, what is declined or not run is skipped.

    Where nothing was run, or not all cases in time, there is a failure that says so.
    """
    suite = ElementTree.Element("testsuite", name=f"refattn verify {shown(report.mechanism)}")
    if isinstance(report, Report):
        for one in report.outcomes:
            skipped = one.detail if one.status == "declined" else None
            failed = "\n".join(one.told()) if one.failed or one.status == "not finished" else None
            _test(suite, f"{report.mechanism}.{one.dtype}", one.case, failed, skipped)
    else:
        for row in report.rows:
            skipped = row.detail if row.status == "not run" else None
            failed = row.detail if row.status == "disagrees" else None
            _test(suite, f"{report.mechanism}.{row.section}", row.name, failed, skipped)
    if report.exit_code == 3 and suite.find("testcase/failure") is None:
        name, failed = "something was run", "nothing was run"
        if isinstance(report, Report) and report.waiting:
            name, failed = "all cases ran", report.not_run[0]
        _test(suite, report.mechanism, name, failed, None)
    for name, kind in (("tests", "testcase"), ("failures", "testcase/failure"), ("skipped", "testcase/skipped")):
        suite.set(name, str(len(suite.findall(kind))))
    suite.set("errors", "0")
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(suites, encoding="unicode")}\n'


def _test(suite: ElementTree.Element, group: str, name: str, failed: str | None, skipped: str | None) -> None:
    test = ElementTree.SubElement(suite, "testcase", classname=f"refattn.{shown(group)}", name=shown(name))
    for kind, text in (("failure", failed), ("skipped", skipped)):
        if text is not None:
            text = shown(text, LONGEST)
            found = ElementTree.SubElement(test, kind, message=text.partition("\n")[0])
            found.text = text
