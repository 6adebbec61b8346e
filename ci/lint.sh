#!/usr/bin/env bash
# Style, format and types.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

ruff check
ruff format --check
mypy
