"""Fakes beside each seam, faults on purpose, and the suite that defines a transport.

Never imported by the rest of mx. Third parties prove a transport of theirs in a few lines:

    from mx.testing import conformance

    @pytest.mark.parametrize("rule", conformance.RULES)
    def test_mine(rule):
        conformance.check(rule, conformance.Harness("my_package.mine:MyTransport"))
"""
