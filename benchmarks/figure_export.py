"""Times the export of ten figures through one browser: ``python benchmarks/figure_export.py``.

Maps of attention on 256 tokens of the demo model, scatters and curves; as PDF, SVG and PNG. The browser's start counts.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from workbench import HookedTransformer
from workbench.analyses import attention_sinks, head_pattern, head_statistics, logit_lens
from workbench.analyses.figures import write_figures

TEXT = "Mara and Hugo went to the harbour. Mara gave the lantern to Hugo. " * 15
N_TOKENS, N_FIGURES = 256, 10


def main() -> None:
    model = HookedTransformer.from_pretrained("demo")
    tokens = model.to_tokens(TEXT)[:, :N_TOKENS]
    statistics, sinks, lens = (analysis(model, tokens) for analysis in (head_statistics, attention_sinks, logit_lens))
    figures = [head_pattern(model, tokens, 2, head).figure(captioned=True) for head in range(4)]
    for result in (statistics, sinks, lens):
        figures += [result.figure(kind, captioned=True) for kind in result.figure_kinds]
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("pdf", "svg", "png"):
            begin = time.perf_counter()
            write_figures({Path(folder) / f"{i}.{kind}": figure for i, figure in enumerate(figures[:N_FIGURES])})
            print(f"{N_FIGURES} figures as {kind}: {time.perf_counter() - begin:.1f} s (asked: 10)")


if __name__ == "__main__":
    main()
