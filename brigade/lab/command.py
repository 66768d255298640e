"""`brigade bench`, `brigade trace` and `brigade plan`: their options. What needs torch is imported when they run."""

from __future__ import annotations

import argparse


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `brigade bench`."""


def bench(options: argparse.Namespace) -> int:
    """brigade bench"""
    raise NotImplementedError


def trace_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `brigade trace`."""


def trace(options: argparse.Namespace) -> int:
    """brigade trace N"""
    raise NotImplementedError


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `brigade plan`."""


def plan(options: argparse.Namespace) -> int:
    """brigade plan"""
    raise NotImplementedError
