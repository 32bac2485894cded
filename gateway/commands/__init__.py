"""The gateway's own sub-commands of ``prfaas``. Each module is imported only when its command runs."""
