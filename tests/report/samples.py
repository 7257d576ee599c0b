"""Cell sources that several tests of the report room use."""

PARAMETERS = """\
budget = 32  # tree nodes
rate = 0.5
smoke = False
name = "tiny"
budgets = [7, 15]
width = None"""
FINAL = "import kdlab.report\nkdlab.report.show_result({'final': True})"
