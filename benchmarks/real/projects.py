"""Modules of packages on PyPI, with synthetic data, by name."""

from __future__ import annotations

from . import chemistry, forecasting, generative, language, own, uncommon, vision
from .project import Project

PROJECTS: dict[str, Project] = {
    project.name: project
    for domain in (forecasting, chemistry, vision, generative, language, own, uncommon)
    for project in domain.PROJECTS
}
