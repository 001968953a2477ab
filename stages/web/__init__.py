"""What every server of pages needs: connections with bounds, a certificate that can be renewed, who may call.

Its modules need the extra `http`.
"""
