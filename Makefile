# make app | test | lint | bench. Each first builds .venv where it is missing or out of date.

PORT ?= 8050
PYTHON ?= python3 python3.13 python3.12 python3.11
export PYTHONSAFEPATH = 1

.PHONY: app test lint bench venv

app: venv
	@.venv/bin/workbench app --port $(PORT)

test: venv
	.venv/bin/pytest

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy -p workbench

bench: venv
	@set -e; for script in benchmarks/*.py; do echo "$$script"; .venv/bin/python "$$script"; done

# .venv/made-from holds this folder (a virtual environment cannot be moved) and a checksum of the files that say
# what is installed. A changed file updates .venv in place; a moved folder or a vanished Python starts it afresh.
venv:
	@set -e; \
	if command -v flock >/dev/null; then exec 9>.venv.lock; flock 9; fi; \
	made_from="$$PWD $$(cat pyproject.toml constraints.txt | cksum)"; \
	was_made_from=$$(.venv/bin/python -c 'print(open(".venv/made-from").read())' 2>/dev/null || true); \
	[ "$$was_made_from" != "$$made_from" ] || exit 0; \
	rm -f .venv/made-from; \
	case "$$was_made_from" in "$$PWD "*) ;; *) \
		unset suitable complete; \
		for python in $(PYTHON); do \
			"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || continue; \
			suitable="$$python"; \
			if "$$python" -c 'import ensurepip, venv' 2>/dev/null; then complete="$$python"; break; fi; \
		done; \
		if [ -z "$$suitable" ]; then \
			echo "No Python 3.11, 3.12 or 3.13 among: $(PYTHON). Install one (Debian, Ubuntu:" \
				"apt install python3 python3-venv) or name it: make app PYTHON=/path/to/python3.12" >&2; exit 1; \
		elif [ -z "$$complete" ]; then \
			echo "$$suitable cannot create virtual environments. Install its venv module" \
				"(Debian, Ubuntu: apt install $${suitable##*/}-venv)" >&2; exit 1; \
		fi; \
		"$$complete" -m venv --clear .venv;; \
	esac; \
	echo "Installing the packages that constraints.txt names into .venv. The first time takes minutes: PyTorch is large."; \
	.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'; \
	echo "$$made_from" > .venv/made-from
