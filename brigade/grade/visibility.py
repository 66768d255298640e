"""Choose which checks students see on Gradescope (`brigade grade --visibility NAME=VALUE`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from brigade.course.listing import list_checks
from brigade.course.modules import CourseError, Module

VISIBLE = "visible"
# https://gradescope-autograders.readthedocs.io/en/latest/specs/#controlling-test-case-visibility
VALUES = (VISIBLE, "hidden", "after_due_date")

Visibility = Mapping[tuple[int, str], str]  # by module and name of the check; the others are visible


def resolve_visibility(settings: Iterable[str], entries: Sequence[Module]) -> Visibility:
    """Return the visibility of the graded checks that settings such as "core=hidden" name.

    A name is a part of the course (`core`), a module (`3`) or a check (`test_subgroups`). A check's setting
    overrides its module's setting, which overrides its part's setting. Raise CourseError for any other setting.
    """
    checks = [(entry, check.name) for entry in entries for check in list_checks(entry)]
    known = [{entry.track for entry in entries}, {str(entry.number) for entry in entries}, {name for _, name in checks}]
    chosen: dict[str, str] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if value not in VALUES:
            raise CourseError(f"--visibility {setting}: write it as NAME=VALUE; VALUE is one of {', '.join(VALUES)}")
        if not any(name in names for names in known):
            parts, modules, _ = (", ".join(sorted(names)) for names in known)
            raise CourseError(
                f"--visibility {setting}: {name} is not a part ({parts}), a module ({modules}) or a check "
                "that is graded here"
            )
        chosen[name] = value
    return {
        (entry.number, name): chosen[source]
        for entry, name in checks
        for source in [next((n for n in (name, str(entry.number), entry.track) if n in chosen), None)]
        if source
    }
