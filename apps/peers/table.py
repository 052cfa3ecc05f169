"""Rows of the same work beside each other."""


def work(row):
    """The work that a row was timed on. Only rows of the same work are compared."""
    return row["preset"], row["batch"], row["kv_len"]


def ratios(results):
    """Each peer's time over ours on the same work: {what: [{preset, batch, kv_len, peer, ours, ratio}]}."""
    found = {}
    for what, rows in results.items():
        timed = [r for r in rows if "median_us" in r]
        ours = {}
        for r in sorted(timed, key=lambda r: r["median_us"], reverse=True):
            if r["system"].startswith("cf-"):
                ours[work(r)] = r
        found[what] = [
            dict(zip(("preset", "batch", "kv_len"), work(r)))
            | {"peer": r["system"], "ours": ours[work(r)]["system"]}
            | {"ratio": r["median_us"] / ours[work(r)]["median_us"]}
            for r in timed
            if not r["system"].startswith("cf-") and work(r) in ours
        ]
    return found


def print_table(results):
    print("| what | preset | batch | kv_len | system | median us | of ours | lines of code |")
    print("|-|-|-:|-:|-|-:|-:|-:|")
    of_ours = {(what, *work(r), r["peer"]): r["ratio"] for what, rows in ratios(results).items() for r in rows}
    for what, rows in results.items():
        for r in sorted(rows, key=work):
            who = (*work(r), r["system"])
            time, ratio = r.get("median_us"), of_ours.get((what, *who))
            cells = (what, *who, r["error"] if time is None else f"{time:.2f}", f"{ratio:.2f}" if ratio else "")
            cells += (r.get("code_lines", ""),)
            print("| " + " | ".join(str(cell) for cell in cells) + " |")
