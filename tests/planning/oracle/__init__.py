"""Exhaustive search over the plans of small problems: no planner may claim more than this search finds.

    python -m tests.planning.oracle --instances 20000 --seed 0

Every instance is planned for the paper's objective or for the first answer, with every option that changes the set of plans:
weights that must be in W, a limit on W, M_peak, transfer modes with and without lanes (which hold a copied weight twice), the
widths of the search, CP-SAT or none, and little time. Others are planned within a budget, in texture slots and staging slots:
images of any width and height, of two channels, share slots in turn. A finding is a plan wrongly called optimal, a bound above
the optimum, a plan that breaks a rule, or a refusal although a plan exists. Two refusals are accepted. In `interleave`,
planners copy a weight in the layer before its use when memory is short. With a limit on W and without CP-SAT, they may then
find no W. Slots are assigned greedily, so a budget may be refused in which better slots fit ("refused, slots exist").
Findings are printed; with a finding the exit code is 1.

The oracle shares no code with the planner. It walks the layers forwards with the remaining chunks of every weight
(`paper.best_cost`). It tries every release time with every move under a separate clock (`first.fastest`), and every way to
share slots (`slots.least_slot_bytes`).
"""
