"""Programs that tests/integrations runs on several ranks."""
