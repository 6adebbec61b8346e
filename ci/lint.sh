#!/usr/bin/env bash
# Style, format and types.
cd "$(dirname "$0")/.."
source ci/setup.sh

ruff check
ruff format --check
mypy
