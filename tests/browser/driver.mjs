// Drives Chromium for the tests: one request in JSON per line on stdin, one answer per line on stdout.

import { createRequire } from 'node:module';
import { createInterface } from 'node:readline';

const [, , packages, executablePath, profile] = process.argv;
const { chromium } = createRequire(`${packages}/`)('playwright-core');

const context = await chromium.launchPersistentContext(profile, {
  executablePath,
  headless: true,
  viewport: { width: 1280, height: 800 },
  args: [
    '--no-sandbox',
    '--disable-gpu',
    '--disable-quic',
    '--no-first-run',
    '--disable-background-networking',
    '--disable-component-update',
    '--disable-sync',
  ],
});

let page;
let troubles;
let requests;

const actions = {
  /** Opens a page of its own; what goes wrong on it is collected. */
  async open({ url, scheme, host }) {
    await leave();
    page = await context.newPage();
    troubles = [];
    requests = [];
    await page.emulateMedia({ colorScheme: scheme ?? 'light' });
    page.on('pageerror', (error) => troubles.push(`page: ${error.stack}`));
    page.on('console', (message) => {
      // Browsers ask every server for an icon; TensorBoard's own page has one, a bare frame has not.
      const isIcon = message.location().url.endsWith('/favicon.ico');
      if (message.type() === 'error' && !isIcon) troubles.push(`console: ${message.text()}`);
    });
    page.on('request', (request) => requests.push(request.url()));
    if (host) {
      await page.route(host.url, (route) =>
        route.fulfill({ contentType: 'text/html', body: host.html }),
      );
    }
    await page.goto(url);
  },
  leave,
  wait: ({ script }) => wait(script),
  evaluate: ({ script }) => page.evaluate(script),
  press: ({ key }) => page.keyboard.press(key),
  type: ({ text }) => page.keyboard.type(text),
  move: ({ x, y }) => page.mouse.move(x, y),
  click: ({ x, y }) => page.mouse.click(x, y),
  fill: ({ selector, value }) => page.locator(selector).first().fill(value),
  choose: ({ selector, value }) => page.locator(selector).first().selectOption(value),
  tap: ({ selector }) => page.locator(selector).first().click(),
  screenshot: ({ path }) => page.screenshot({ path }).then(() => null),
  resize: ({ width, height }) => page.setViewportSize({ width, height }),
  report: () => ({ troubles, requests }),
};

/** Closes the page; what went wrong on it stays in the report. */
async function leave() {
  if (page) await page.close();
  page = undefined;
}

// Playwright's own way evaluates a string on the page, which a report's content policy forbids.
async function wait(script) {
  for (const end = Date.now() + 40000; !(await page.evaluate(script)); ) {
    if (Date.now() > end) throw new Error('waited for 40 seconds');
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const { action, ...options } = JSON.parse(line);
  let answer;
  try {
    answer = { value: (await actions[action](options)) ?? null };
  } catch (error) {
    answer = { error: error.message };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
await context.close();
